"""The index comes back as it was written, or names what is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws

from refill.errors import IndexDamaged, IndexVersionUnsupported, InvalidInput, RefillError
from refill_service.cache_core.dataset_index import (
    BLOCK_SAMPLES,
    HEADER_BYTES,
    INDEX_VERSION,
    RECORD,
    BlobTable,
    DatasetIndex,
    RecordArray,
    SampleRecords,
    decode_header,
    decode_index,
    encode_block,
    encode_head,
)
from refill_service.datasets.index_writer import IndexWriter

SOURCE = "s3://bucket/data/refill.index"


def records_of(count: int, seed: int = 0, first_offset: int = 0) -> RecordArray:
    random = np.random.default_rng(seed)
    records = np.zeros(count, dtype=RECORD)
    lengths = random.integers(1, 10_000, count)
    records["length"] = lengths
    records["offset"] = first_offset + np.cumsum(lengths) - lengths
    records["checksum"] = random.integers(0, 2**64, count, dtype=np.uint64)
    return records


def write(folder: Path, blobs: list[RecordArray], metadata: dict[str, Any] | None = None) -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    with IndexWriter(folder) as writer:
        for number, records in enumerate(blobs):
            size = int(records["offset"][-1] + records["length"][-1]) + 1024 if len(records) else 1024
            writer.add_blob(f"blöb-{number:06}.tar", size, np.array_split(records, 3) if len(records) else [])
        return writer.finish(metadata or {}).read_bytes()


def read(data: bytes) -> DatasetIndex:
    header = decode_header(data, SOURCE, len(data))
    return decode_index(header, data[HEADER_BYTES : header.head_bytes])


def load(index: DatasetIndex, data: bytes, first: int, end: int) -> SampleRecords:
    start, stop = index.records_range(first, end)
    return index.decode_records(data[start:stop], first, end)


def read_all(data: bytes) -> SampleRecords:
    index = read(data)
    return load(index, data, 0, index.num_samples)


class TestRoundTrip:
    @pytest.mark.parametrize("counts", [[], [0], [1], [5, 0, 7], [BLOCK_SAMPLES], [3000, 3000, 3001], [1, 9000]])
    def test_comes_back(self, tmp_path: Path, counts: list[int]) -> None:
        blobs = [records_of(count, seed) for seed, count in enumerate(counts)]
        metadata = {"classes": ["cat", "dög"], "seed": 7}
        data = write(tmp_path, blobs, metadata)
        index = read(data)
        assert index.metadata == metadata
        assert index.num_samples == sum(counts)
        assert list(index.blobs.names) == [f"blöb-{number:06}.tar" for number in range(len(counts))]
        assert index.blobs.first_sample.tolist() == [0, *np.cumsum(counts).tolist()]
        everything = np.concatenate(blobs) if blobs else np.zeros(0, RECORD)
        assert index.sample_bytes == everything["length"].sum()
        assert index.header.index_bytes == len(data)
        loaded = load(index, data, 0, index.num_samples)
        for name in ("offset", "length", "checksum"):
            assert (getattr(loaded, name) == everything[name]).all()

    @given(st.data())
    @draws(60)
    def test_any_range(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        stored, everything = self.three_blocks(tmp_path_factory)
        first = data.draw(st.integers(0, len(everything)))
        end = data.draw(st.integers(first, len(everything)))
        index = read(stored)
        start, stop = index.records_range(first, end)
        assert stop - start <= ((end - first) // BLOCK_SAMPLES + 2) * index.header.block_bytes
        records = load(index, stored, first, end)
        assert (records.first_sample, records.end_sample) == (first, end)
        assert (records.checksum == everything["checksum"][first:end]).all()
        assert (records.offset == everything["offset"][first:end]).all()

    _made: tuple[bytes, RecordArray] | None = None

    @classmethod
    def three_blocks(cls, factory: pytest.TempPathFactory) -> tuple[bytes, RecordArray]:
        if cls._made is None:
            records = records_of(2 * BLOCK_SAMPLES + 100)
            cls._made = write(factory.mktemp("index"), [records]), records
        return cls._made

    def test_wide_only_where_needed(self, tmp_path: Path) -> None:
        narrow = read(write(tmp_path / "narrow", [records_of(3)]))
        assert narrow.header.record_bytes == 16
        far = records_of(3, first_offset=2**40)
        data = write(tmp_path / "wide", [far])
        assert read(data).header.record_bytes == 24
        assert (read_all(data).offset == far["offset"]).all()

    def test_same_input_same_bytes(self, tmp_path: Path) -> None:
        first, again = (write(tmp_path / name, [records_of(5000)], {"b": 1, "a": 2}) for name in "ab")
        assert first == again
        other = write(tmp_path / "c", [records_of(5000, seed=1)], {"b": 1, "a": 2})
        assert read(other).fingerprint != read(first).fingerprint

    def test_blob_of(self, tmp_path: Path) -> None:
        index = read(write(tmp_path, [records_of(2), records_of(0), records_of(3)]))
        assert [index.blobs.blob_of(sample) for sample in range(5)] == [0, 0, 2, 2, 2]
        assert index.blobs.names[-1] == "blöb-000002.tar"
        assert index.blobs.names[1:] == ["blöb-000001.tar", "blöb-000002.tar"]

    def test_ranges_outside(self, tmp_path: Path) -> None:
        index = read(write(tmp_path, [records_of(5)]))
        for first, end in ((0, 6), (-1, 3), (4, 3)):
            with pytest.raises(InvalidInput):
                index.records_range(first, end)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("small"), [records_of(20), records_of(15)], {"classes": ["a"]})


class TestDamage:
    def test_every_truncation_is_noticed(self, small: bytes) -> None:
        for length in range(len(small)):
            with pytest.raises(IndexDamaged) as caught:
                read_all(small[:length])
            assert SOURCE in caught.value.message
            assert caught.value.details["section"] in caught.value.message
            assert caught.value.details["start"] <= length <= caught.value.details["end"]

    def test_truncation_of_which_the_store_does_not_tell(self, small: bytes) -> None:
        header = decode_header(small, SOURCE)
        for length in range(HEADER_BYTES, header.head_bytes):
            with pytest.raises(IndexDamaged):
                decode_index(header, small[HEADER_BYTES:length])
        index = read(small)
        start, stop = index.records_range(0, 35)
        for end in range(start, stop):
            with pytest.raises(IndexDamaged, match=f"records, bytes {start}-{stop}"):
                index.decode_records(small[start:end], 0, 35)

    def test_every_flipped_byte_is_noticed_and_located(self, small: bytes) -> None:
        for place in range(len(small)):
            damaged = bytearray(small)
            damaged[place] ^= 0x40
            with pytest.raises((IndexDamaged, IndexVersionUnsupported)) as caught:
                read_all(bytes(damaged))
            if isinstance(caught.value, IndexDamaged):
                assert caught.value.details["start"] <= place < caught.value.details["end"]
            else:
                assert 8 <= place < 12

    @given(st.data())
    @draws(300)
    def test_garbage(self, small: bytes, data: st.DataObject) -> None:
        damaged = bytearray(small)
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, len(small) - 1))
            piece = data.draw(st.binary(min_size=1, max_size=16))
            damaged[place : place + data.draw(st.integers(0, 16))] = piece
        if bytes(damaged) != small:
            with pytest.raises(RefillError) as caught:
                read_all(bytes(damaged))
            assert isinstance(caught.value, (IndexDamaged, IndexVersionUnsupported))

    @given(st.binary(max_size=400))
    def test_only_garbage(self, data: bytes) -> None:
        with pytest.raises(IndexDamaged):
            read_all(data)

    def test_bytes_after_the_end(self, small: bytes) -> None:
        with pytest.raises(IndexDamaged, match="not its own"):
            read(small + b"\0")

    def test_blocks_of_another_index_or_place(self, tmp_path: Path) -> None:
        data = bytearray(write(tmp_path / "a", [records_of(2 * BLOCK_SAMPLES)]))
        other = write(tmp_path / "b", [records_of(2 * BLOCK_SAMPLES, seed=1)])
        index = read(bytes(data))
        start, stop = index.records_range(0, BLOCK_SAMPLES)
        with pytest.raises(IndexDamaged, match="block 0 of records"):
            index.decode_records(other[start:stop], 0, BLOCK_SAMPLES)
        with pytest.raises(IndexDamaged, match="block 1 of records"):
            index.decode_records(data[start:stop], BLOCK_SAMPLES, 2 * BLOCK_SAMPLES)

    @pytest.mark.parametrize("found", [1, 2, INDEX_VERSION + 1])
    def test_another_version_and_what_to_do(self, small: bytes, found: int) -> None:
        other = small[:8] + found.to_bytes(4, "little") + small[12:]
        with pytest.raises(IndexVersionUnsupported, match=f"has version {found} .*refill index --force") as caught:
            read(other)
        assert caught.value.details["version"] == found

    @pytest.mark.parametrize("first_sample", [[1, 3, 5], [0, 6, 5], [0, 3, 2**62]])
    def test_numbers_with_a_right_checksum_that_cannot_be(self, first_sample: list[int]) -> None:
        blobs = BlobTable(["a", "b"], np.array(first_sample, np.int64), np.array([10, 10], np.int64))
        _, head = encode_head(blobs, sample_bytes=5, fingerprint=1, wide=False, metadata={})
        with pytest.raises(IndexDamaged):
            decode_index(decode_header(head, SOURCE), head[HEADER_BYTES:])

    def test_an_encoded_block_is_compact(self) -> None:
        records = records_of(10)
        block = encode_block(
            SampleRecords(0, records["offset"], records["length"], records["checksum"]),
            block=0,
            fingerprint=1,
            wide=False,
        )
        assert len(block) == 10 * 16 + 8
