"""ArrayRecord, where it lies: held against array-record's own writer and reader, and against files by the layout."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import InvalidInput, SampleDamaged
from refill.formats.arrayrecord import make_parser
from refill_service.cli import main
from refill_service.demo.local_cluster import LocalCluster
from refill_service.formats import arrayrecord
from refill_service.formats.interface import Shard, ShardReport
from tests.conftest import S3Server
from tests.formats import peers
from tests.formats.array_files import BLOCK, array_file, chunk, footer, last_block
from tests.formats.in_memory import MemoryShard
from tests.formats.reading import asked_of, epoch_of, opened, put

# Around the places where a block of 64 KiB begins, and the ends of its cut.
SIZES = [0, 1, 200, *(BLOCK - 64 - 40 - 5 + each for each in range(-30, 31, 3)), BLOCK, 2 * BLOCK, 200_000]


def records(seed: int = 0) -> list[bytes]:
    made = random.Random(seed)
    sizes = [*SIZES, *(made.randrange(90_000) for _ in range(20))]
    made.shuffle(sizes)
    # Zeros and places of themselves look like cuts.
    filling = (made.randbytes, bytes, lambda size: np.arange(size // 2 + 1, dtype="<u2").tobytes()[:size])
    return [filling[place % 3](size) for place, size in enumerate(sizes)]


def found_in(data: bytes, holds: str = "bytes") -> list[bytes]:
    """Each record, as the index has its place, and the client reads what lies there."""
    parse, samples = make_parser({"holds": holds}), []
    for batch in arrayrecord.scan(Shard("x", len(data), None), MemoryShard({"x": data}, "x"), ShardReport()):
        for start, length in zip(batch["offset"].tolist(), batch["length"].tolist(), strict=True):
            samples.append(bytes(parse(memoryview(data)[start : start + length], 0)[1]["data"]))
    return samples


@pytest.mark.parametrize(
    "options", ["group_size:1", "group_size:1,uncompressed", "group_size:1,uncompressed,pad_to_block_boundary:true"]
)
def test_as_its_own_reader_has_it(tmp_path: Path, pod: LocalCluster, capsys: Any, options: str) -> None:
    names = [f"train.array_record-{place:05}-of-00003" for place in range(3)]
    for place, name in enumerate(names):
        peers.write_array_record(tmp_path / name, options, records(place))
    assert main(["index", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "format arrayrecord: 3 files of ArrayRecord with records of bytes" in said
    assert "read are headers alone (--checksums first-read)" in said
    theirs = [record for name in names for record in peers.read_array_record(tmp_path / name)]
    assert theirs == [record for place in range(3) for record in records(place)]
    assert [sample["data"] for sample in epoch_of(pod, tmp_path.as_uri())] == theirs


@pytest.mark.parametrize("options", ["group_size:1", "group_size:1,uncompressed"])
def test_records_that_are_examples(tmp_path: Path, pod: LocalCluster, capsys: Any, options: str) -> None:
    a_is_x = b"\x0a\x0a\x0a\x01a\x12\x05\x0a\x03\x0a\x01x"
    b_is_numbers = b"\x0a\x0f\x0a\x01b\x12\x0a\x1a\x08\x0a\x06\x01\x7f\xff\x01\x00\x05"
    example = b"\x0a\x1d" + a_is_x + b_is_numbers
    peers.write_array_record(tmp_path / "a.array_record", options, [example] * 9)
    assert main(["index", str(tmp_path)]) == 0
    assert "records of tf.Example" in capsys.readouterr().err
    for sample in epoch_of(pod, tmp_path.as_uri()):
        assert (sample["a"], sample["b"].tolist()) == (b"x", [1, 127, 255, 0, 5])


def test_two_requests_and_a_thousandth_of_the_bytes(
    tmp_path: Path, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = random.Random(1)
    for place in range(2):
        data = array_file([made.randbytes(30_000 + place) for _ in range(200)])
        (tmp_path / f"{place}.array_record").write_bytes(data)
    url = put(s3_environment, tmp_path)
    with asked_of(s3_environment) as asked:
        monkeypatch.setenv("AWS_ENDPOINT_URL", asked.url)
        assert main(["index", url, "--quiet"]) == 0
    for place in range(2):
        requests, num_bytes = asked.of(f"{place}.array_record")
        # Of one of all files, 4 kB are looked at, to see what records hold.
        assert requests <= 2 + (place == 0)
        assert num_bytes <= (tmp_path / f"{place}.array_record").stat().st_size / 1000 + 4096 * (place == 0)


@given(st.lists(st.integers(0, 3 * BLOCK), max_size=4), st.integers(0, 2**32))
def test_whatever_cuts_go_through(sizes: list[int], seed: int) -> None:
    made = random.Random(seed)
    wanted = [made.choice((made.randbytes, bytes))(size) for size in sizes]
    assert found_in(array_file(wanted)) == wanted


def test_files_with_long_footers_and_with_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrayrecord, "_PIECE_BYTES", 1000)
    wanted = [b"%d" % place for place in range(9000)]
    assert found_in(array_file(wanted)) == wanted
    assert found_in(array_file([])) == []
    (tmp_path / "a.array_record").write_bytes(array_file([]))
    assert main(["index", str(tmp_path)]) == 2


def test_files_by_other_names(tmp_path: Path, pod: LocalCluster) -> None:
    (tmp_path / "train").write_bytes(array_file([b"x", b"yy"] * 4))
    assert main(["index", str(tmp_path), "--quiet", "--format", "arrayrecord", "--checksums", "all"]) == 0
    index, _ = opened(tmp_path.as_uri())
    assert (index.num_samples, index.header.has_checksums) == (8, True)
    assert [sample["data"] for sample in epoch_of(pod, tmp_path.as_uri())] == [b"x", b"yy"] * 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("group_size:8,uncompressed", "write it with group_size:1"),
        ("group_size:8", "write it with group_size:1"),
        ("group_size:1,brotli", "packed by brotli can't be read: write it by zstd, or uncompressed"),
        ("group_size:1,snappy", "packed by snappy can't be read"),
        ("group_size:1,transpose:true", "transposed"),
    ],
)
def test_what_is_refused_says_how_to_write_it(tmp_path: Path, capsys: Any, options: str, says: str) -> None:
    peers.write_array_record(tmp_path / "a.array_record", options, [b"a record"] * 100)
    assert main(["index", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "refill.index").exists()


WHOLE = array_file([b"abc", b"de"])
FOOTER_AT = 64 + 2 * 40 + 6 + 5


def changed(at: int, value: bytes) -> bytes:
    return WHOLE[:at] + value + WHOLE[at + len(value) :]


def with_footer(data: bytes) -> bytes:
    return (WHOLE[:FOOTER_AT] + data).ljust(BLOCK, b"\0") + last_block(FOOTER_AT)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (array_file([b"a"] * 6, per_chunk=3), "write it with group_size:1"),
        (WHOLE[:-1], "it has 131071 bytes, and one has two blocks"),
        (WHOLE + b"x", "cut off: it is not of whole blocks"),
        (WHOLE[:-BLOCK], "it has 65536 bytes, and one has two blocks"),
        (WHOLE + bytes(BLOCK), "it is no ArrayRecord, or cut off: a chunk of kind"),
        (WHOLE[:-BLOCK] + last_block(FOOTER_AT, magic=7), "does not say where the footer is"),
        (WHOLE[:-BLOCK] + last_block(3), "its footer can't begin at byte 3"),
        (WHOLE[:-BLOCK] + last_block(BLOCK), f"its footer can't begin at byte {BLOCK}"),
        (WHOLE[:-BLOCK] + last_block(FOOTER_AT + 1), "its footer can't be read"),
        (changed(FOOTER_AT + 8, b"\xff\xff\xff"), "are left of the file"),
        (with_footer(footer([64, 64])), "chunks can't lie as it says, between 64 and 64"),
        (with_footer(footer([64, 2**40])), "chunks can't lie as it says"),
        (with_footer(footer([0, 107])), "chunks can't lie as it says, between 0"),
        (with_footer(footer([64, 2**63])), "a line of it is none"),
        (with_footer(footer([64], options=b"transpose:true")), "its records are transposed"),
        (with_footer(chunk([b"\x0a\x04\x08\1\x10\2", b"\x08\x40\x10\0\x18\1"])), "with 2 chunks of which 1 are there"),
        (with_footer(chunk([b"\x0a\x04\x08\2\x10\1", b"\x08\x40\x10\0\x18\1"])), "of version 2"),
        (with_footer(chunk([b"\x0a\x04\x08\1\x10\1", b"\x08\x40\x10\0\x20\1"])), "a line of it is none"),
    ],
)  # fmt: skip
def test_damaged_files(tmp_path: Path, capsys: Any, data: bytes, says: str) -> None:
    (tmp_path / "a.array_record").write_bytes(data)
    assert main(["index", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "a.array_record" in said
    assert [each.startswith(("format ", "refill: ")) for each in said.splitlines()][-2:] in ([True], [True, True])


class TestParser:
    @pytest.mark.parametrize(
        "data",
        [
            b"", bytes(39), bytes(200), chunk([b"a"])[:-1], chunk([b"a", b"b"]), chunk([b"a"], kind=b"t"),
            chunk([b"a"], packing=0x7A), chunk([]),
        ],
    )  # fmt: skip
    def test_what_is_no_chunk(self, data: bytes) -> None:
        with pytest.raises(SampleDamaged, match="sample 3 is no chunk of ArrayRecord"):
            make_parser({"holds": "bytes"})(memoryview(data), 3)

    def test_what_is_no_example(self) -> None:
        with pytest.raises(SampleDamaged, match=r"no tf\.Example"):
            make_parser({"holds": "Example"})(memoryview(chunk([b"\x0a\xff"])), 3)

    def test_what_this_can_not_unpack_is_refused_by_name(self) -> None:
        with pytest.raises(InvalidInput, match="packed by brotli can't be read"):
            make_parser({"holds": "bytes"})(memoryview(chunk([b"a"], packing=0x62)), 3)

    def test_what_needs_a_library_names_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(InvalidInput, match=r"pip install 'refill-cache\[arrayrecord\]'"):
            make_parser({"holds": "bytes"})(memoryview(chunk([b"\1x"], packing=0x7A, num_bytes=1)), 3)

    def test_what_is_packed_takes_no_more_than_it_says(self) -> None:
        zstandard = pytest.importorskip("zstandard")
        bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
        for claimed in (b"\x05", b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x80\x80\x80\x80\x10"):
            data = chunk([claimed + bomb], packing=0x7A, num_bytes=5)
            with pytest.raises(SampleDamaged, match="said to be packed"):
                make_parser({"holds": "bytes"})(memoryview(data), 3)
