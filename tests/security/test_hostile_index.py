"""An index says how much is to be read and held; a pod believes it only within bounds that it knows before it reads.

Files with holes are as large as their names say, and cost nothing: so is an index whose checksums are right.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import xxhash
from tests.pod_fixtures import metric, rank_of, whole_epoch
from tests.security.hostile_datasets import Claim, claim_of, header_bytes, write_index

from refill.errors import IndexDamaged, InvalidInput, MemoryTooSmall, RefillError
from refill_service.cache_core.dataset_index import (
    HEADER_BYTES,
    INDEX_KEY,
    MAX_METADATA_BYTES,
    BlobTable,
    IndexHeader,
    SampleRecords,
    decode_header,
    decode_index,
    encode_head,
)
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.index_room import IndexRoom
from refill_service.demo.local_cluster import LocalCluster

MEMORY = 64 << 20
ALLOWED_BYTES = 100_000_000
"""By which a pod's resident set may grow while it refuses an index: what indexes may take in a pod of this size."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def pod(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = {"memory_bytes": MEMORY, "pinned_fraction": 0, "wait_seconds": 2, "dataset_urls": folder.as_uri()}
    with LocalCluster(1, tmp_path_factory.mktemp("pods"), settings) as cluster:
        yield cluster


@pytest.fixture(params=["redox", "planned"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def answer_to(pod: LocalCluster, url: str, policy: str, **settings: Any) -> RefillError:
    """One line, for which the pod took no more memory than it may."""
    before = peak_bytes(pod)
    with pytest.raises(RefillError) as raised:
        rank_of(pod, {"name": "hostile", "dataset": url, "policy": policy} | settings, timeout_seconds=0).batch(
            0, np.arange(1)
        )
    httpx.delete(f"{pod.pod_urls[0]}/v1/jobs/hostile")
    assert len(str(raised.value).splitlines()) == 1
    assert "failed unexpectedly" not in str(raised.value)
    assert peak_bytes(pod) - before < ALLOWED_BYTES
    return raised.value


def peak_bytes(pod: LocalCluster) -> int:
    """The most that the pod's resident set has ever been."""
    status = Path(f"/proc/{pod.processes[0].pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def with_holes(folder: Path, header: bytes) -> str:
    """An index of the size that its header names, of which nothing but the header is written."""
    folder.mkdir(exist_ok=True)
    with (folder / INDEX_KEY).open("wb") as file:
        file.write(header)
        file.truncate(decode_header(header, "").index_bytes)
    return folder.as_uri()


def announcing(metadata_bytes: int) -> bytes:
    """A header that names more metadata than a header of ours would: written as bytes, with a right checksum."""
    packed = bytearray(header_bytes())
    struct.pack_into("<Q", packed, 24 + 8 * 3, metadata_bytes)
    packed[-8:] = xxhash.xxh3_64_intdigest(bytes(packed[:-8])).to_bytes(8, "little")
    return bytes(packed)


def test_metadata_of_1500_mib(pod: LocalCluster, folder: Path, policy: str) -> None:
    size = 1500 << 20
    (folder / "metadata").mkdir(exist_ok=True)
    with (folder / "metadata" / INDEX_KEY).open("wb") as file:
        file.write(announcing(size))
        file.truncate(HEADER_BYTES + size + 8)
    error = answer_to(pod, (folder / "metadata").as_uri(), policy)
    assert isinstance(error, IndexDamaged)
    assert f"announces {size} bytes of metadata" in str(error)


@pytest.mark.parametrize("num_samples", [40_000_000, 2**40])
def test_more_records_than_a_pod_may_hold(pod: LocalCluster, folder: Path, policy: str, num_samples: int) -> None:
    """A file may have holes of up to some terabytes; what is claimed beyond has no object of that size."""
    blobs = BlobTable(["blob"], np.array([0, num_samples]), np.array([num_samples]))
    header, head = encode_head(blobs, sample_bytes=num_samples, fingerprint=1, wide=False, metadata={})
    url_folder = folder / f"records-{num_samples}"
    url_folder.mkdir(exist_ok=True)
    with (url_folder / INDEX_KEY).open("wb") as file:
        file.write(head)
        try:
            file.truncate(header.index_bytes)
        except OSError:
            pytest.skip("this file system has no files of that size")
    for chunk_size in (1, 64, 0):
        error = answer_to(pod, url_folder.as_uri(), policy, chunk_size=chunk_size)
        assert isinstance(error, MemoryTooSmall), error
        assert "for indexes" in str(error) or (policy == "planned" and "its tables of" in str(error))


def test_a_blob_table_larger_than_a_pod_may_hold(pod: LocalCluster, folder: Path, policy: str) -> None:
    url = with_holes(folder / "blobs", header_bytes(num_blobs=20_000_000, names_bytes=20_000_000))
    assert isinstance(answer_to(pod, url, policy), MemoryTooSmall)


def test_room_for_indexes_is_given_back(packed: tuple[str, dict[str, bytes]], folder: Path) -> None:
    """When a dataset is closed, and when it could not be opened or read."""
    room = IndexRoom(MEMORY)

    async def run() -> None:
        dataset = await Dataset.open(packed[0], room=room)
        await dataset.load_records(0, dataset.num_samples)
        assert room.used_bytes > 32 * dataset.num_samples
        await dataset.close()
        await dataset.close()
        assert room.used_bytes == 0
        wrong = write_index(folder / "no-names", [("", 0, [])])
        with pytest.raises(IndexDamaged):
            await Dataset.open(wrong, room=room)
        assert room.used_bytes == 0

    asyncio.run(run())


WRONG_RECORDS = {
    "behind the end": [Claim(0, 10), Claim(95, 10)],
    "before the start": [Claim(-5, 10)],
    "of negative length": [Claim(50, -10)],
    "too large for numbers": [Claim(2**62, 2**62)],
    "past 64 bits": [Claim(10, 2**63 - 1)],
    "over each other": [Claim(0, 50), Claim(40, 50)],
    "backwards": [Claim(50, 10), Claim(0, 10)],
}


@pytest.mark.parametrize("name", WRONG_RECORDS)
def test_samples_lie_within_their_blob_one_after_another(
    pod: LocalCluster, folder: Path, policy: str, name: str
) -> None:
    url = write_index(folder / name, [("blob", 100, WRONG_RECORDS[name])], sample_bytes=100)
    (folder / name / "blob").write_bytes(bytes(100))
    error = answer_to(pod, url, policy)
    assert isinstance(error, IndexDamaged)
    assert "can't lie at byte" in str(error)


def test_what_lies_between_samples_counts_as_read(pod: LocalCluster, folder: Path, policy: str) -> None:
    """Two samples 1.2 GB apart in one chunk are one range of 1.2 GB."""
    size = 1_200_000_000
    samples = [claim_of(bytes(100)), claim_of(bytes(100), size - 100)]
    url = write_index(folder / "apart", [("blob", size, samples)])
    with (folder / "apart" / "blob").open("wb") as file:
        file.truncate(size)
    for shuffle in (True, False):
        error = answer_to(pod, url, policy, chunk_size=2, shuffle=shuffle)
        assert isinstance(error, MemoryTooSmall)
        assert f"{size:,} of its blob" in str(error)


def test_chunks_that_lie_apart_are_not_read_together(pod: LocalCluster, folder: Path) -> None:
    """Each fits, and all that lies between them does not: read one by one, the job is served."""
    data, gap, count = bytes(1000), 40_000_000, 30
    samples = [claim_of(data, place * gap) for place in range(count)]
    url = write_index(folder / "gaps", [("blob", count * gap, samples)])
    with (folder / "gaps" / "blob").open("wb") as file:
        file.truncate(count * gap)
    before = peak_bytes(pod)
    read = metric(pod.pod_urls[0], "refill_store_bytes_total", operation="read_range")
    rank = rank_of(pod, {"name": "gaps", "dataset": url, "chunk_size": 1, "num_epochs": 1})
    assert sum(len(batch.sample_ids) for batch in whole_epoch(rank, 0)) == count
    rank.end_job()
    assert metric(pod.pod_urls[0], "refill_store_bytes_total", operation="read_range") - read < 1_000_000
    assert peak_bytes(pod) - before < ALLOWED_BYTES


def test_a_sample_that_claims_terabytes(pod: LocalCluster, folder: Path, policy: str) -> None:
    """Of a blob that claims them, too, and has a hundred bytes: its size is no bound."""
    url = write_index(folder / "claims", [("blob", 2**42, [Claim(0, 2**41)])])
    (folder / "claims" / "blob").write_bytes(bytes(100))
    for shuffle in (True, False):
        assert isinstance(answer_to(pod, url, policy, shuffle=shuffle), MemoryTooSmall)


def test_it_serves_others_afterwards(pod: LocalCluster, folder: Path) -> None:
    data = os.urandom(4000)
    url = write_index(folder / "after", [("blob", 4000, [claim_of(data[i : i + 40], i) for i in range(0, 4000, 40)])])
    (folder / "after" / "blob").write_bytes(data)
    rank = rank_of(pod, {"name": "after", "dataset": url, "chunk_size": 8})
    assert sum(len(batch.sample_ids) for batch in whole_epoch(rank, 0)) == 100
    rank.end_job()


def decoded(head: bytes) -> IndexHeader:
    header = decode_header(head, "index")
    decode_index(header, head[HEADER_BYTES:])
    return header


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"a":' * 100 + b"1" + b"}" * 100, b"[]", b"1", b'{"a": NaN}', b'{"a": "\\ud800"}', b"\xff"],
)
def test_metadata_is_what_json_can_say(text: bytes) -> None:
    """Pods send it to clients."""
    blobs = BlobTable([], np.zeros(1, np.int64), np.zeros(0, np.int64))
    _, head = encode_head(blobs, sample_bytes=0, fingerprint=1, wide=True, metadata={})
    header = decode_header(head, "index")
    changed = dataclasses.replace(header, metadata_bytes=len(text), metadata_checksum=xxhash.xxh3_64_intdigest(text))
    with pytest.raises(IndexDamaged, match="metadata"):
        decode_index(changed, text + head[header.head_bytes - header.blobs_bytes :])


def test_metadata_that_no_pod_would_read_is_not_written() -> None:
    blobs = BlobTable([], np.zeros(1, np.int64), np.zeros(0, np.int64))
    with pytest.raises(InvalidInput, match="metadata takes"):
        encode_head(
            blobs,
            sample_bytes=0,
            fingerprint=1,
            wide=True,
            metadata={"classes": ["x" * 1000] * (MAX_METADATA_BYTES // 1000)},
        )


@pytest.mark.parametrize(
    ("first_sample", "size_bytes", "names"),
    [
        ([0, 2**63 - 1, -(2**63), -1, 8], [1] * 4, list("abcd")),  # each step fits 64 bits, wrapped around
        ([0, 4, 8], [-1, 100], list("ab")),
        ([0, 4, 8], [2**63 - 1, 2**63 - 1], list("ab")),
        ([0, 4, 8], [2, 2], list("ab")),  # fewer bytes than its samples have
    ],
)
def test_a_blob_table_that_contradicts_itself(first_sample: list[int], size_bytes: list[int], names: list[str]) -> None:
    blobs = BlobTable(names, np.array(first_sample, dtype=np.int64), np.array(size_bytes, dtype=np.int64))
    _, head = encode_head(blobs, sample_bytes=800, fingerprint=1, wide=True, metadata={})
    with pytest.raises(IndexDamaged, match="blob table"):
        decoded(head)


def test_names_are_text() -> None:
    blobs = BlobTable(["aé", "b"], np.array([0, 1, 2]), np.array([9, 9]))
    _, head = encode_head(blobs, sample_bytes=8, fingerprint=1, wide=True, metadata={})
    decoded(head)
    header = decode_header(head, "index")
    for text, ends in ((b"a\xff\xffb", (3, 4)), ("aéb".encode(), (2, 4))):
        table = head[header.head_bytes - header.blobs_bytes : header.head_bytes]
        table = table[: -len(text) - 16] + struct.pack("<qq", *ends) + text
        changed = dataclasses.replace(header, blobs_checksum=xxhash.xxh3_64_intdigest(table))
        with pytest.raises(IndexDamaged, match="not UTF-8"):
            decode_index(changed, b"{}" + table)


def test_samples_have_no_more_bytes_than_the_header_says() -> None:
    blobs = BlobTable(["a"], np.array([0, 2]), np.array([100]))
    _, head = encode_head(blobs, sample_bytes=10, fingerprint=1, wide=True, metadata={})
    index = decode_index(decode_header(head, "index"), head[HEADER_BYTES:])
    checksums = np.zeros(2, dtype=np.uint64)
    index.check_records(SampleRecords(0, np.array([0, 50]), np.array([5, 5]), checksums))
    with pytest.raises(IndexDamaged, match="samples have more than 10 bytes"):
        index.check_records(SampleRecords(0, np.array([0, 50]), np.array([5, 6]), checksums))
