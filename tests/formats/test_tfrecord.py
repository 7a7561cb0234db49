"""TFRecord, where it lies: held against the tfrecord package's own writer, reader and tfrecord2idx."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import SampleDamaged
from refill.formats import tfrecord as parser_module
from refill.formats.tfrecord import make_parser
from refill.protocol.crc32c import crc32c, masked, slow_crc32c
from refill_service.cli import main
from refill_service.demo.local_cluster import LocalCluster
from tests.conftest import S3Server
from tests.formats import peers
from tests.formats.reading import asked_of, bytes_at, epoch_of, opened, put

NUM_SAMPLES = 40


def framed(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    return length + struct.pack("<I", masked(crc32c(length))) + record + struct.pack("<I", masked(crc32c(record)))


def example(number: int) -> dict[str, Any]:
    made = random.Random(number)
    return {
        "image/encoded": (made.randbytes(made.randrange(0, 3000)), "byte"),
        "label": (number - 7, "int"),
        "many": ([-1, 2**62, number, 0, -(2**63)], "int"),
        "weights": (np.linspace(0, number, 9).tolist(), "float"),
        "words": ([b"a", b"b" * number], "byte"),
    }


def write(path: Path, numbers: range, *, context: bool = False) -> None:
    writer = peers.tfrecord().TFRecordWriter(str(path))
    for number in numbers:
        if context:
            steps = ([[number, 2], [3]] if number % 2 else [[1], [2], [3]], "int")
            writer.write({"length": (number, "int")}, {"steps": steps})
        else:
            writer.write(example(number))
    writer.close()


def peer_samples(path: Path) -> list[dict[str, Any]]:
    reader = peers.tfrecord().reader
    return list(reader.tfrecord_loader(str(path), None))


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert set(ours) - {"__id__", "__key__"} == set(theirs)
    for name, value in theirs.items():
        if isinstance(value, np.ndarray) and value.dtype.kind == "S":
            assert ours[name] == list(value), name
        elif isinstance(value, np.ndarray):
            assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
            assert np.array_equal(ours[name], value), name
        else:
            assert ours[name] == value, name


@pytest.mark.parametrize("indexed_by", ["one pass", "tfrecord2idx"])
def test_as_its_own_reader_has_it(tmp_path: Path, pod: LocalCluster, capsys: Any, indexed_by: str) -> None:
    names = [f"train-{each}.tfrecord" for each in range(3)]
    for place, name in enumerate(names):
        write(tmp_path / name, range(place * 15, place * 15 + 15))
    if indexed_by == "tfrecord2idx":
        peers.tfrecord().tools.tfrecord2idx.create_indices(str(tmp_path))
    assert main(["index", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "format tfrecord: 3 files of TFRecord with records of tf.Example" in said
    assert ("headers alone" if indexed_by == "tfrecord2idx" else "for places and checksums") in said
    assert opened(tmp_path.as_uri())[0].header.has_checksums == (indexed_by == "one pass")
    assert b"".join(bytes_at(tmp_path)) == b"".join((tmp_path / name).read_bytes() for name in names)
    theirs = [sample for name in names for sample in peer_samples(tmp_path / name)]
    for ours, their in zip(epoch_of(pod, tmp_path.as_uri()), theirs, strict=True):
        same(ours, their)


def test_sequence_examples(tmp_path: Path, pod: LocalCluster, capsys: Any) -> None:
    write(tmp_path / "a.tfrecord", range(20), context=True)
    assert main(["index", str(tmp_path)]) == 0
    assert "records of tf.SequenceExample" in capsys.readouterr().err
    for number, sample in enumerate(epoch_of(pod, tmp_path.as_uri())):
        assert sample["length"].tolist() == [number]
        steps = [[number, 2], [3]] if number % 2 else [[1], [2], [3]]
        assert [each.tolist() for each in sample["steps"]] == steps


def test_records_of_other_bytes_and_names(tmp_path: Path, pod: LocalCluster, capsys: Any) -> None:
    records = [random.Random(each).randbytes(50 + each) for each in range(30)]
    (tmp_path / "train-00000-of-00001").write_bytes(b"".join(map(framed, records)))
    assert main(["index", str(tmp_path), "--format", "tfrecord"]) == 0
    assert "records of bytes" in capsys.readouterr().err
    assert [sample["data"] for sample in epoch_of(pod, tmp_path.as_uri())] == records


def _field(number: int, data: bytes) -> bytes:
    size = bytes([len(data)]) if len(data) < 128 else bytes([len(data) & 127 | 128, len(data) >> 7])
    return bytes([8 * number + 2]) + size + data


def _feature(name: bytes, value: bytes) -> bytes:
    """An entry of features, or a step's."""
    return _field(1, _field(1, name) + _field(2, _field(1, _field(1, value))))


_LISTS = _field(2, _field(1, _field(1, b"steps") + _field(2, _field(1, _field(1, _field(1, b"s"))))))


@pytest.mark.parametrize(
    ("records", "holds"),
    [
        ([b"", _field(1, b""), _field(1, _feature(b"a", b"x"))], "tf.Example"),
        ([_field(1, _feature(b"id", b"v0")), _field(1, _feature(b"id", b"v1")) + _LISTS], "tf.SequenceExample"),
        ([_field(1, _field(1, b"segment")) + _field(4, bytes(6000))], "bytes"),
        ([b"\nChapter 1\n" + b"lorem ipsum " * 1000], "bytes"),
    ],
    ids=["empty ones first", "a context alone first", "another message", "text"],
)
def test_what_records_hold_is_not_guessed_by_the_first_bytes(
    tmp_path: Path, pod: LocalCluster, capsys: Any, records: list[bytes], holds: str
) -> None:
    (tmp_path / "a.tfrecord").write_bytes(b"".join(map(framed, records)))
    assert main(["index", str(tmp_path)]) == 0
    assert f"records of {holds}" in capsys.readouterr().err
    found = epoch_of(pod, tmp_path.as_uri(), chunk_size=1)
    if holds == "bytes":
        assert [each["data"] for each in found] == records
    else:
        assert found[-1]["a" if holds == "tf.Example" else "id"] in (b"x", b"v1")


def test_a_name_of_a_context_and_of_a_list_is_refused() -> None:
    parse = make_parser({"holds": "SequenceExample"})
    for record in (
        _field(1, _feature(b"steps", b"x")) + _LISTS,
        _LISTS + _field(1, _feature(b"steps", b"x")),
    ):
        assert parser_module.kind_of(memoryview(record), len(record)) == "SequenceExample"
        with pytest.raises(SampleDamaged, match="'steps' is in its context and a list, or there twice"):
            parse(memoryview(framed(record)), 0)


def test_a_key_of_bytes_is_the_key() -> None:
    record = _field(1, _feature(b"__key__", b"doc-17") + _feature(b"a", b"x"))
    assert make_parser({"holds": "Example"})(memoryview(framed(record)), 0) == ("doc-17", {"a": b"x"})


def test_with_an_index_two_requests_and_a_thousandth_of_the_bytes(
    tmp_path: Path, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, lines = b"", ""
    for number in range(50):
        record = framed(random.Random(number).randbytes(30_000))
        lines += f"{len(data)} {len(record)}\n"
        data += record
    for place in range(2):
        (tmp_path / f"{place}.tfrecord").write_bytes(data)
        (tmp_path / f"{place}.tfrecord.idx").write_text(lines)
    url = put(s3_environment, tmp_path)
    with asked_of(s3_environment) as asked:
        monkeypatch.setenv("AWS_ENDPOINT_URL", asked.url)
        assert main(["index", url, "--quiet"]) == 0
    for place in range(2):
        requests, num_bytes = asked.of(f"{place}.tfrecord")
        of_index, index_bytes = asked.of(f"{place}.tfrecord.idx")
        assert requests + of_index <= 2
        # Of one of all files, 4 kB are looked at, to see what records hold.
        assert num_bytes + index_bytes <= len(data) / 1000 + 4096 * (place == 0)


@pytest.mark.parametrize("context", [False, True])
def test_the_start_of_a_record_says_what_it_holds(tmp_path: Path, context: bool) -> None:
    write(tmp_path / "a", range(1, 2), context=context)
    record = memoryview((tmp_path / "a").read_bytes())[12:-4]
    kind = "SequenceExample" if context else "Example"
    assert [parser_module.kind_of(record[:end], len(record)) for end in (12, len(record))] == [kind, kind]
    assert parser_module.kind_of(memoryview(b"\x0a\xff"), 300) == "bytes"
    assert parser_module.kind_of(memoryview(b"abcdefghijkl"), 300) == "bytes"


class TestDamage:
    def said(self, folder: Path, data: bytes, capsys: Any, index: str | None = None) -> str:
        (folder / "a.tfrecord").write_bytes(data)
        if index is not None:
            (folder / "a.tfindex").write_text(index)
        assert main(["index", str(folder)]) == 2
        assert not (folder / "refill.index").exists()
        return str(capsys.readouterr().err)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda data: data[:-1], "a record of 300 bytes runs past the end"),
            (lambda data: data[:-310], "it ends within a record, after 4 whole ones"),
            (
                lambda data: data[:700] + b"?" + data[701:],
                "byte 632 on (of 1580): the checksum of record 2, of 300",
            ),
            (
                lambda data: data[:316] + b"?" + data[317:],
                "byte 316 on (of 1580): the checksum of a record's length",
            ),
            (lambda data: b"?" + data, "is not a TFRecord file"),
            (lambda data: b"\x1f\x8b" + data, "compressed by gzip"),
        ],
    )
    def test_of_a_file(self, tmp_path: Path, capsys: Any, change: Any, says: str) -> None:
        data = b"".join(framed(bytes([each]) * 300) for each in range(5))
        assert says in self.said(tmp_path, change(data), capsys)

    @pytest.mark.parametrize(
        ("index", "says"),
        [
            ("0 316\n316 316\n", "it ends at byte 632"),
            ("0 316\n300 332\n632 948\n", "line 2 does not follow"),
            ("0 x\n", "not a list of lines"),
            ("0 99999999999999999999\n", "not a list of lines"),
            ("0 632\n632 948\n", "of another record"),
            ("", "it ends at byte 0"),
        ],
    )
    def test_of_an_index(self, tmp_path: Path, capsys: Any, index: str, says: str) -> None:
        data = b"".join(framed(bytes([each]) * 300) for each in range(5))
        found = self.said(tmp_path, data, capsys, index)
        assert says in found
        assert "a.tfindex" in found

    def test_gzip_is_refused_by_name(self, tmp_path: Path, capsys: Any) -> None:
        (tmp_path / "a.tfrecord.gz").write_bytes(b"\x1f\x8b")
        assert main(["index", str(tmp_path)]) == 2
        assert "decompress" in capsys.readouterr().err

    def test_a_record_that_is_not_what_it_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The checksum of a record is compared where a compiled one is installed: in Python it takes too long."""
        monkeypatch.setattr(parser_module, "is_fast", True)
        parse, right = make_parser({"holds": "bytes"}), framed(b"abcdef")
        assert parse(memoryview(right), 1) == ("1", {"data": b"abcdef"})
        for wrong in (right[:-1], right + b"x", b"", right[:13] + b"?" + right[14:]):
            with pytest.raises(SampleDamaged, match="sample 1 is no TFRecord"):
                parse(memoryview(wrong), 1)
        monkeypatch.setattr(parser_module, "is_fast", False)
        assert parse(memoryview(right[:13] + b"?" + right[14:]), 1)[1] == {"data": b"a?cdef"}


@given(st.binary(max_size=9000), st.integers(0, 9000))
def test_the_slow_checksum_is_the_right_one(data: bytes, cut: int) -> None:
    assert slow_crc32c(b"123456789") == 0xE3069283
    assert slow_crc32c(data[cut:], slow_crc32c(data[:cut])) == slow_crc32c(data) == crc32c(data)
