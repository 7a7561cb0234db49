"""``refill index --checksums first-read``: what it asks of a store, and what pods make of such an index."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refill.errors import DatasetReplaced, IndexDamaged, InvalidInput, SampleDamaged
from refill_service.cache_core.dataset_index import (
    HEADER_BYTES,
    BlobTable,
    SampleRecords,
    decode_header,
    decode_index,
    encode_block,
    encode_head,
)
from refill_service.cli import main
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.index_shards import index_shards
from refill_service.datasets.inspect_dataset import find_damage
from refill_service.formats.interface import Options
from refill_service.object_store.base import ObjectReplaced
from refill_service.object_store.open_store import open_store
from tests.conftest import S3Server
from tests.formats.reading import asked_of, opened, put
from tests.membership.planned_in_process import Run, new_name
from tests.membership.pods_in_process import PodsInProcess

TOKENS = 1024
OPTIONS = Options(tokens=TOKENS + 1, stride=TOKENS)
NUM_SAMPLES = 3 * 500


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three files of 2 MB with a header of numpy, and one token more than samples take."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        tokens = np.random.default_rng(number).integers(0, 2**16, 500 * TOKENS + 1).astype(np.uint32)
        np.save(folder / f"{number}.npy", tokens)
    return folder


def indexed(url: str, **more: Any) -> str:
    """What it said."""
    said: list[str] = []
    asyncio.run(index_shards(url, options=OPTIONS, say=said.append, **more))
    return said[0]


@pytest.fixture
def pods(tmp_path: Path, s3_environment: S3Server) -> Iterator[PodsInProcess]:
    with PodsInProcess(2, dataset_urls="file:///,s3://") as found:
        yield found


def run_of(pods: PodsInProcess, url: str, **more: Any) -> Run:
    return Run(pods, url, new_name(), 1, memory_bytes=400_000, chunk_size=8, timeout_seconds=60, **more)


class TestWhatItAsks:
    def test_no_more_than_headers(
        self, shards: Path, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url = put(s3_environment, shards)
        with asked_of(s3_environment) as asked:
            monkeypatch.setenv("AWS_ENDPOINT_URL", asked.url)
            said = indexed(url)
        assert said.endswith("read are headers alone (--checksums first-read)")
        size = (shards / "0.npy").stat().st_size
        for number in range(3):
            requests, num_bytes = asked.of(f"{number}.npy")
            assert requests <= 2
            assert num_bytes <= size / 1000

    def test_reads_name_the_version_and_take_no_request_more(
        self, shards: Path, s3_environment: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url = put(s3_environment, shards)
        indexed(url)
        with asked_of(s3_environment) as asked:
            monkeypatch.setenv("AWS_ENDPOINT_URL", asked.url)
            with PodsInProcess(2, dataset_urls="s3://") as counted:
                run_of(counted, url, num_epochs=1).take(0, 0)
        reads = [name for name, _ in asked.reads if name.endswith(".npy")]
        assert len(reads) <= 1.01 * (NUM_SAMPLES // 8 + 3)
        assert not [name for name in asked.without_if_match if name.endswith(".npy")]
        assert not [name for name in asked.heads if name.endswith(".npy")]

    def test_tars_are_read_whole_anyway(self, tmp_path: Path) -> None:
        (tmp_path / "a.tar").write_bytes(bytes(1024))
        with pytest.raises(InvalidInput, match="no header says where"):
            asyncio.run(index_shards(tmp_path.as_uri(), checksums="first-read"))


class TestIndex:
    def test_a_copy_is_the_same_dataset(self, shards: Path, tmp_path: Path, s3_environment: S3Server) -> None:
        indexed(shards.as_uri())
        index, records = opened(shards.as_uri())
        assert (index.num_samples, index.header.has_checksums, index.header.overlaps) == (NUM_SAMPLES, False, True)
        assert index.blobs.etags is not None
        assert all(index.blobs.etags)
        url = put(s3_environment, shards)
        indexed(url, force=True)
        copied, others = opened(url)
        assert copied.fingerprint == index.fingerprint
        assert list(copied.blobs.etags or ()) != list(index.blobs.etags)
        assert np.array_equal(others.offset, records.offset)

    def test_with_checksums_it_is_another_one(self, shards: Path) -> None:
        indexed(shards.as_uri())
        before = opened(shards.as_uri())[0].fingerprint
        assert indexed(shards.as_uri(), checksums="all", force=True).endswith("all bytes are read once, for checksums")
        index, _ = opened(shards.as_uri())
        assert index.fingerprint != before
        assert (index.header.has_checksums, index.header.has_etags) == (True, False)
        assert verified(shards.as_uri()) == []

    @pytest.mark.parametrize("etags", [["a b", "c"], ["a\r\n", ""], ["x" * 201, ""], ["é", ""]])
    def test_etags_that_can_not_be(self, etags: list[str]) -> None:
        """They go into headers of requests."""
        table = BlobTable(
            ["a", "b"], np.array([0, 1, 2]), np.array([9, 9]), [each.encode().decode("latin-1")[:0] for each in etags]
        )
        _, head = encode_head(table, sample_bytes=8, fingerprint=1, wide=False, metadata={}, has_checksums=False)
        assert decode_index(decode_header(head, "x"), head[HEADER_BYTES:]).blobs.etag_of(0) is None
        broken = BlobTable(["a", "b"], np.array([0, 1, 2]), np.array([9, 9]), [_Letters(each) for each in etags])
        _, head = encode_head(broken, sample_bytes=8, fingerprint=1, wide=False, metadata={}, has_checksums=False)
        with pytest.raises(IndexDamaged, match="its ETags can't be"):
            decode_index(decode_header(head, "x"), head[HEADER_BYTES:])

    @pytest.mark.parametrize(
        ("offset", "length", "fits"),
        [
            ([0, 5, 10], [10, 10, 10], True),
            ([0, 4, 9], [10, 10, 10], False),
            ([0, 2], [10, 5], False),
            ([5, 4], [9, 9], False),
        ],
    )
    def test_samples_overlap_with_neighbours_alone(self, offset: list[int], length: list[int], fits: bool) -> None:
        table = BlobTable(["a"], np.array([0, len(offset)]), np.array([20]))
        _, head = encode_head(
            table, sample_bytes=sum(length), fingerprint=1, wide=False, metadata={}, overlaps=True
        )  # fmt: skip
        index = decode_index(decode_header(head, "x"), head[HEADER_BYTES:])
        records = SampleRecords(0, np.array(offset), np.array(length), np.zeros(len(offset), np.uint64))
        if fits:
            index.check_records(records)
        else:
            with pytest.raises(IndexDamaged, match="can't lie"):
                index.check_records(records)

    def test_round_trip_of_records_without_checksums(self) -> None:
        table = BlobTable(["a"], np.array([0, 2]), np.array([2**33]), ['"e"'])
        records = SampleRecords(0, np.array([0, 2**32]), np.array([3, 4]), np.zeros(2, np.uint64), False)
        _, head = encode_head(table, sample_bytes=7, fingerprint=1, wide=True, metadata={}, has_checksums=False)
        index = decode_index(decode_header(head, "x"), head[HEADER_BYTES:])
        found = index.decode_records(encode_block(records, block=0, fingerprint=1, wide=True), 0, 2)
        assert (index.header.record_bytes, found.has_checksums) == (16, False)
        assert (found.offset.tolist(), found.length.tolist()) == ([0, 2**32], [3, 4])
        assert index.blobs.etag_of(0) == '"e"'


class _Letters(str):
    def encode(self, *_: Any) -> bytes:  # type: ignore[override]
        return super().encode("utf-8")


def verified(url: str) -> list[str]:
    async def look() -> list[str]:
        dataset = await Dataset.open(url)
        try:
            return [error.message async for error in find_damage(dataset, lambda num_bytes: None)]
        finally:
            await dataset.close()

    return asyncio.run(look())


async def write_another(url: str, key: str, data: bytes) -> None:
    store = open_store(url)
    try:
        before = await store.etag(key)
        while True:
            await store.write(key, data)
            try:
                store.check_same(key, before, await store.etag(key))
            except ObjectReplaced:
                return
    finally:
        await store.close()


class TestPods:
    @pytest.mark.variants(
        "skip-in an epoch-s3",
        "raise-before it is read-s3",
        "raise-in an epoch-file",
        "skip-before it is read-file",
    )
    @pytest.mark.parametrize("kind", ["file", "s3"])
    @pytest.mark.parametrize("when", ["before it is read", "in an epoch"])
    @pytest.mark.parametrize("on_damaged", ["raise", "skip"])
    def test_an_object_that_changed_gives_no_other_bytes(
        self, shards: Path, pods: PodsInProcess, s3_environment: S3Server, kind: str, when: str, on_damaged: str
    ) -> None:
        url = shards.as_uri() if kind == "file" else put(s3_environment, shards)
        indexed(url)
        run = run_of(pods, url, on_damaged=on_damaged)
        if when == "in an epoch":
            run.take(0, 0, 640)
        for number in range(3):
            data = bytearray((shards / f"{number}.npy").read_bytes())
            data[2000:] = data[2000:][::-1]
            asyncio.run(write_another(url, f"{number}.npy", bytes(data)))
        with pytest.raises(DatasetReplaced, match=r"is not the object that was indexed.*refill index --force"):
            run.take(0, 640 if when == "in an epoch" else 0)

    def test_a_moved_copy_goes_on_from_a_state(self, shards: Path, pods: PodsInProcess, tmp_path: Path) -> None:
        indexed(shards.as_uri())
        run = run_of(pods, shards.as_uri())
        run.take(0, 0, 640)
        (state,) = run.states(0, 640)
        copy = tmp_path / "copy"
        shutil.copytree(shards, copy, copy_function=shutil.copyfile)
        indexed(copy.as_uri(), force=True)
        run.ranks[0].end_job()
        moved = Run(
            pods, copy.as_uri(), run.name, 1, states=state, memory_bytes=400_000, chunk_size=8, timeout_seconds=60
        )
        assert moved.plan == run.plan
        moved.take(0, 640)
        assert sorted(run.positions_of(0) + moved.positions_of(0)) == list(range(NUM_SAMPLES))


def test_a_copy_with_its_index_says_what_to_do(shards: Path, pods: PodsInProcess, tmp_path: Path) -> None:
    indexed(shards.as_uri())
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy, copy_function=shutil.copyfile)
    run = run_of(pods, copy.as_uri())
    with pytest.raises(DatasetReplaced, match="is not the object that was indexed: it has another ETag"):
        run.take(0, 0)
    run.ranks[0].end_job()
    indexed(copy.as_uri(), force=True)
    run_of(pods, copy.as_uri()).take(0, 0)


def test_a_sample_must_stay_what_it_was_at_its_first_read(shards: Path) -> None:
    """As with memory that goes wrong, or a store that gives other bytes under the same ETag."""
    indexed(shards.as_uri())

    async def read() -> None:
        dataset = await Dataset.open(shards.as_uri())
        try:
            records = await dataset.load_records(0, dataset.num_samples)
            first = bytes(await dataset.read_samples(records, 7, 8))
            dataset.verify_sample(first, records, 7)
            dataset.verify_sample(first, records, 7)
            with pytest.raises(SampleDamaged, match="not what it was when this pod first read it"):
                dataset.verify_sample(first[::-1], records, 7)
        finally:
            await dataset.close()

    asyncio.run(read())


def test_inspect_says_that_there_are_no_checksums(shards: Path, capsys: Any) -> None:
    indexed(shards.as_uri())
    assert main(["inspect", str(shards), "--verify", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "each sample's at its first read (--checksums first-read)" in said
    assert f"all {NUM_SAMPLES} samples are there; the index has no checksums to compare them with" in said
