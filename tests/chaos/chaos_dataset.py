"""Which samples do chaos runs deliver? A small dataset in an S3 store, of which every byte is known here."""

from __future__ import annotations

import asyncio
import random
import tempfile
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import numpy as np

from refill.protocol.wire_format import Int64Array
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.pack import pack

__all__ = ["PLANNED_SAMPLES", "ChaosDataset", "dataset_in_s3", "put_dataset"]

NUM_SAMPLES = 960
"""Two and three ranks divide it without a rest, so that no position repeats a sample."""
PLANNED_SAMPLES = 957
"""Of planned jobs, whose ranks need not: what repeats, or is left out, is known."""


@dataclass(frozen=True)
class ChaosDataset:
    url: str
    environment: Mapping[str, str]
    """By which the store is reached."""
    checksums: list[int]
    """crc32 of the bytes of each sample, by its id."""
    lengths: Int64Array
    """Bytes of each."""
    first_sample: Int64Array
    """``(blobs + 1,)``."""

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())

    @property
    def endpoint(self) -> str:
        return self.environment["AWS_ENDPOINT_URL"]


def dataset_in_s3(
    environment: Mapping[str, str], *, num_samples: int = NUM_SAMPLES, most_bytes: int = 4000, seed: int = 1
) -> ChaosDataset:
    """Packs files of 100 to ``most_bytes`` bytes and copies the dataset into a bucket of its own."""
    bucket = f"chaos-{uuid.uuid4().hex[:12]}"
    _client(environment).create_bucket(Bucket=bucket)
    return put_dataset(environment, bucket, num_samples, most_bytes, seed)


def put_dataset(
    environment: Mapping[str, str], bucket: str, num_samples: int, most_bytes: int, seed: int
) -> ChaosDataset:
    """Into a bucket, in place of the one that is there, if one is."""
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="refill-chaos-") as folder:
        files, store = Path(folder) / "files", Path(folder) / "store"
        files.mkdir()
        for number in range(num_samples):
            content = generator.randbytes(generator.randint(100, most_bytes))
            (files / f"sample{number:06}.bin").write_bytes(content)
        asyncio.run(pack(str(files), store.as_uri(), blob_bytes=75 * most_bytes))
        client = _client(environment)
        for path in store.rglob("*"):
            if path.is_file():
                client.put_object(Bucket=bucket, Key=path.relative_to(store).as_posix(), Body=path.read_bytes())
        return asyncio.run(_known(store, f"s3://{bucket}", environment))


async def _known(store: Path, url: str, environment: Mapping[str, str]) -> ChaosDataset:
    dataset = await Dataset.open(store.as_uri())
    records = await dataset.load_records(0, dataset.num_samples)
    blobs = {name: (store / name).read_bytes() for name in dataset.blobs.names}
    samples = []
    for sample in range(dataset.num_samples):
        first, length = int(records.offset[sample]), int(records.length[sample])
        samples.append(blobs[dataset.blobs.names[dataset.blobs.blob_of(sample)]][first : first + length])
    first_sample = dataset.blobs.first_sample
    await dataset.close()
    lengths = np.array(list(map(len, samples)), dtype=np.int64)
    return ChaosDataset(url, dict(environment), [zlib.crc32(each) for each in samples], lengths, first_sample)


def _client(environment: Mapping[str, str]) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_REGION"],
    )
