"""How do tests index files in place, count what that asked of a store, and read an epoch of them through a real pod?"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from torch.utils.data import DataLoader

from refill import CacheDataset, EpochSampler
from refill_service.cache_core.dataset_index import DatasetIndex, SampleRecords
from refill_service.datasets.dataset_reader import Dataset
from refill_service.demo.local_cluster import LocalCluster
from tests.conftest import S3Server
from tests.s3_gate import Gate

__all__ = ["Asked", "asked_of", "bytes_at", "epoch_of", "opened", "put"]


@dataclass
class Asked:
    """Requests for objects that a store answered: name, and how many bytes came."""

    url: str = ""
    reads: list[tuple[str, int]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    without_if_match: list[str] = field(default_factory=list)

    def of(self, key: str) -> tuple[int, int]:
        """``(requests, bytes)``."""
        sizes = [size for name, size in self.reads if name.endswith(key)]
        return len(sizes) + sum(name.endswith(key) for name in self.heads), sum(sizes)


@contextmanager
def asked_of(server: S3Server) -> Iterator[Asked]:
    """A relay in front of the S3 server that counts."""
    asked = Asked()

    class Counting(Gate):
        disable_nagle_algorithm = True

        def refused(self) -> bool:
            if self.command == "HEAD":
                asked.heads.append(unquote(urlsplit(self.path).path))
            return False

        def given(self, data: bytes) -> bytes:
            path = urlsplit(self.path)
            if "list-type" not in path.query:
                asked.reads.append((unquote(path.path), len(data)))
                if self.headers.get("if-match") is None:
                    asked.without_if_match.append(unquote(path.path))
            return data

    Counting.upstream, Counting.secrets, Counting.read_only = urlsplit(server.endpoint_url).netloc, {}, set()
    Counting.fail_first = Counting.cut_first = 0
    Counting.stall, Counting.delay_seconds = False, 0.0
    relay = ThreadingHTTPServer(("127.0.0.1", 0), Counting)
    asked.url = f"http://127.0.0.1:{relay.server_address[1]}"
    thread = threading.Thread(target=relay.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield asked
    finally:
        relay.shutdown()
        relay.server_close()
        thread.join(10)


def put(server: S3Server, folder: Path) -> str:
    """A copy of a folder in a bucket of its own: its URL."""
    bucket = server.new_bucket()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            key = path.relative_to(folder).as_posix()
            server.client().put_object(Bucket=bucket, Key=f"data/{key}", Body=path.read_bytes())
    return f"s3://{bucket}/data"


def opened(url: str) -> tuple[DatasetIndex, SampleRecords]:
    """The index, and all its records."""

    async def read() -> tuple[DatasetIndex, SampleRecords]:
        dataset = await Dataset.open(url)
        try:
            return dataset.index, await dataset.load_records(0, dataset.num_samples)
        finally:
            await dataset.close()

    return asyncio.run(read())


def bytes_at(folder: Path) -> list[bytes]:
    """Of each sample, as the index says."""
    index, records = opened(folder.as_uri())
    found = []
    for sample in range(index.num_samples):
        data = (folder / index.blobs.names[index.blobs.blob_of(sample)]).read_bytes()
        start = int(records.offset[sample])
        found.append(data[start : start + int(records.length[sample])])
    return found


def epoch_of(pods: LocalCluster, url: str, *, epoch: int = 0, **more: Any) -> list[Any]:
    """All samples of an epoch of a planned job, each checked to have come once, in the order of their ids."""
    settings = {"policy": "planned", "memory_bytes": 4 << 20, "chunk_size": 8, "num_epochs": 2, **more}
    dataset = CacheDataset(pods.pod_urls[0], dataset=url, job=f"job-{uuid.uuid4().hex[:8]}", **settings)
    try:
        sampler = EpochSampler(dataset)
        sampler.set_epoch(epoch)
        loader = DataLoader(dataset, sampler=sampler, batch_size=16, collate_fn=list)
        found = [sample for batch in loader for sample in batch]
        ids = sorted(sample["__id__"] for sample in found)
        assert ids == list(range(len(dataset))), "not each sample came once"
        return sorted(found, key=lambda sample: sample["__id__"])
    finally:
        dataset.end_job()
