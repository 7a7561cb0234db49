"""MosaicML's MDS, where it lies: held against mosaicml-streaming's own writer and reader, byte for byte, key by key."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from refill.errors import SampleDamaged
from refill.formats.mds import make_parser
from refill_service.cli import main
from refill_service.demo.local_cluster import LocalCluster
from tests.conftest import S3Server
from tests.formats import peers
from tests.formats.reading import asked_of, bytes_at, epoch_of, put

NUM_SAMPLES = 60


def picture(number: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 255, (9 + number % 3, 7, 3)).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def jpeg(number: int) -> bytes:
    out = io.BytesIO()
    picture(number).save(out, format="JPEG")
    return out.getvalue()


def as_jpeg(number: int) -> Image.Image:
    return Image.open(io.BytesIO(jpeg(number)))


COLUMNS: dict[str, tuple[str, Any]] = {
    "raw": ("bytes", lambda n: random.Random(n).randbytes(n % 7)),
    "text": ("str", lambda n: "é" * n),
    "number": ("int", lambda n: n - 5),
    "wide": ("int64", lambda n: -(2**60) + n),
    **{f"a_{kind}": (kind, lambda n: n) for kind in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32")},
    **{f"a_{kind}": (kind, lambda n: n / 3) for kind in ("float16", "float32", "float64")},
    "any_array": ("ndarray", lambda n: np.arange(n + 1, dtype=("int16", "float32")[n % 2]).reshape(-1, 1)),
    "typed_array": ("ndarray:int32", lambda n: np.arange(2 * n + 2, dtype=np.int32).reshape(2, -1)),
    "fixed_array": ("ndarray:uint16:2,3", lambda n: np.full((2, 3), n, dtype=np.uint16)),
    "long_array": ("ndarray:uint8", lambda n: np.zeros(300 + n, dtype=np.uint8)),
    "digits": ("str_int", lambda n: 10**30 + n),
    "float_digits": ("str_float", lambda n: n / 7),
    "decimal": ("str_decimal", lambda n: Decimal(n) / 8),
    "pil": ("pil", lambda n: picture(n, ("RGB", "L", "RGBA", "1", "F", "I")[n % 6])),
    "photo": ("jpeg", as_jpeg),
    "photos": ("jpeg_array", lambda n: [jpeg(n), jpeg(n + 1)]),
    "other_photos": ("jpegarray", lambda n: [jpeg(n)]),
    "drawing": ("png", lambda n: picture(n)),
    "pils": ("list[pil]", lambda n: [picture(each) for each in range(n % 3)]),
    "jpegs": ("list[jpeg]", lambda n: [as_jpeg(each) for each in range(n % 3)]),
    "pngs": ("list[png]", lambda n: [picture(each) for each in range(n % 3)]),
    "about": ("json", lambda n: {"n": [n, None], "é": "x"}),
    "any": ("pkl", lambda n: {n, 1}),
}


def write(folder: Path, columns: dict[str, str], num_samples: int = NUM_SAMPLES, **more: Any) -> None:
    more = {"size_limit": 60_000} | more
    with peers.mosaicml().MDSWriter(out=str(folder), columns=columns, **more) as out:
        for number in range(num_samples):
            out.write({name: COLUMNS[name][1](number) for name in columns})


def peer_samples(folder: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Bytes and values of each sample, as the peer's reader has them."""
    found = []
    for said in json.loads((folder / "index.json").read_text())["shards"]:
        reader = peers.mosaicml().MDSReader.from_json(str(folder), None, said)
        for number in range(reader.samples):
            data = reader.get_sample_data(number)
            found.append((data, reader.decode_sample(data)))
    return found


def same(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(theirs, list) and theirs and isinstance(theirs[0], Image.Image):
        assert len(ours) == len(theirs), where
        for one, other in zip(ours, theirs, strict=True):
            same(one, other, where)
    elif isinstance(theirs, Image.Image):
        pixels = np.asarray(theirs)
        assert (ours.dtype, ours.shape) == (pixels.dtype, pixels.shape), where
        assert np.array_equal(ours, pixels), where
    elif isinstance(theirs, (np.ndarray, np.generic)):
        assert type(ours) is type(theirs), where
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        assert np.array_equal(ours, theirs), where
    else:
        assert type(ours) is type(theirs), where
        assert ours == theirs, where


def test_each_encoding_as_its_own_reader_has_it(tmp_path: Path, pod: LocalCluster, capsys: Any) -> None:
    written = {each.partition(":")[0] for each, _ in COLUMNS.values()}
    assert not set(peers.mosaicml().encodings.get_mds_encodings()) - written, "some encodings are not written here"
    write(tmp_path, {name: encoding for name, (encoding, _) in COLUMNS.items()})
    assert main(["index", str(tmp_path), "--allow-pickle"]) == 0
    said = capsys.readouterr().err
    assert "format mds: index.json names" in said
    assert "read are headers alone (--checksums first-read)" in said
    theirs = peer_samples(tmp_path)
    assert bytes_at(tmp_path) == [data for data, _ in theirs]
    # "raw" and "text" are no names of standard decoders of bytes; pictures become arrays.
    found = epoch_of(pod, tmp_path.as_uri(), decode={"pkl": pickle.loads})
    for ours, (_, sample) in zip(found, theirs, strict=True):
        assert set(ours) == {"__key__", "__id__", *sample}
        for name in sample:
            same(ours[name], sample[name], f"{name} of sample {ours['__id__']}")


def test_without_decode_pictures_are_their_bytes(tmp_path: Path, pod: LocalCluster) -> None:
    write(tmp_path, {"photo": "jpeg", "number": "int"})
    assert main(["index", str(tmp_path), "--quiet"]) == 0
    for number, sample in enumerate(epoch_of(pod, tmp_path.as_uri())):
        assert type(sample["photo"]) is bytes
        assert Image.open(io.BytesIO(sample["photo"])).format == "JPEG"
        assert sample["number"] == number - 5
    shapes = epoch_of(pod, tmp_path.as_uri(), decode={"photo": len}, as_tuple=None)
    assert [sample["photo"] for sample in shapes] == [
        len(sample["photo"]) for sample in epoch_of(pod, tmp_path.as_uri())
    ]


def test_two_requests_and_a_thousandth_of_the_bytes(
    tmp_path: Path, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with peers.mosaicml().MDSWriter(out=str(tmp_path), columns={"x": "bytes"}, size_limit=2 << 20) as out:
        for number in range(256):
            out.write({"x": bytes([number]) * 20_000})
    url = put(s3_environment, tmp_path)
    with asked_of(s3_environment) as asked:
        monkeypatch.setenv("AWS_ENDPOINT_URL", asked.url)
        assert main(["index", url, "--quiet"]) == 0
    shards = sorted(path.name for path in tmp_path.glob("*.mds"))
    assert len(shards) == 3
    for name in shards:
        requests, num_bytes = asked.of(name)
        assert requests <= 2
        assert num_bytes <= (tmp_path / name).stat().st_size / 1000


# Without the peer: files as FORMATS say they are.


def written(folder: Path, change: Any = lambda index: None, shard: Any = lambda data: None) -> None:
    """Three samples of a column of variable size and one of 8 bytes."""
    rows = [
        struct.pack("<I", len(text)) + struct.pack("<q", number) + text
        for number, text in enumerate((b"a", b"", b"xyz"))
    ]
    start = 4 * 5 + 2
    ends = np.cumsum([start, *map(len, rows)]).astype("<u4")
    data = bytearray(struct.pack("<I", 3) + ends.tobytes() + b"{}" + b"".join(rows))
    columns = {"column_names": ["n", "t"], "column_encodings": ["int", "str"], "column_sizes": [8, None]}
    index = {
        "version": 2,
        "shards": [
            {
                "version": 2, "format": "mds", "compression": None, "hashes": [], "samples": 3, "size_limit": 1 << 26,
                "raw_data": {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}}, "zip_data": None,
            }
            | columns
        ],
    }  # fmt: skip
    shard(data)
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "shard.00000.mds").write_bytes(data)


def test_an_independent_writer(tmp_path: Path, pod: LocalCluster) -> None:
    written(tmp_path)
    assert main(["index", str(tmp_path), "--quiet"]) == 0
    found = epoch_of(pod, tmp_path.as_uri(), chunk_size=2)
    assert [(sample["n"], sample["t"]) for sample in found] == [(0, "a"), (1, ""), (2, "xyz")]


def set_shard(**more: Any) -> Any:
    return lambda index: index["shards"][0].update(more)


def patch(at: int, value: bytes) -> Any:
    def change(data: bytearray) -> None:
        data[at : at + len(value)] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_shard(compression="zstd:7", zip_data={"basename": "x", "bytes": 1}), "it is compressed (zstd:7)"),
        (set_shard(column_encodings=["int", "pkl"]), "holds pickles, which run as code"),
        (set_shard(column_encodings=["int", "secret"]), "doesn't know the encoding 'secret'"),
        (set_shard(format="json"), "of format 'json'"),
        (set_shard(samples=4), "the dataset's index says 4"),
        (set_shard(samples=10**6), "no room for the places"),
        (set_shard(samples=True), "its description is not that of a shard"),
        (set_shard(column_sizes=[8]), "its description is not that of a shard"),
        (set_shard(column_names=["n", "n"]), "one of them twice"),
        (set_shard(column_sizes=[-8, None]), "can't have -8 bytes"),
        (set_shard(raw_data={"basename": "../../etc/passwd", "bytes": 9}), "'../../etc/passwd', and it is not there"),
        (set_shard(raw_data={"basename": "shard.00000.mds", "bytes": 9}), "says 9"),
        (lambda index: index.update(version=1), "not an index of MDS shards of version 2"),
        (lambda index: index["shards"].append(index["shards"][0] | {"column_names": ["m", "t"]}), "other columns"),
    ],
)  # fmt: skip
def test_an_index_that_can_not_be_read(tmp_path: Path, capsys: Any, change: Any, says: str) -> None:
    written(tmp_path, change)
    assert main(["index", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "refill.index").exists()


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, b"\4", "says that it holds 4 samples"),
        (4, b"\0", "sample 0 can't begin at byte 0"),
        (8, b"\xff\xff", "sample 2 can't begin at byte"),
        (16, b"\x01\x01", "its samples end at byte 257"),
    ],
)
def test_a_damaged_shard(tmp_path: Path, capsys: Any, at: int, value: bytes, says: str) -> None:
    written(tmp_path, shard=patch(at, value))
    assert main(["index", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "shard.00000.mds: can't be read from byte" in said
    assert says in said


def test_pickles_that_are_let_in_run_nowhere_unless_the_caller_does(
    tmp_path: Path, pod: LocalCluster, capsys: Any
) -> None:
    written(tmp_path, set_shard(column_encodings=["int", "pkl"]))
    assert main(["index", str(tmp_path), "--quiet", "--allow-pickle"]) == 0
    found = epoch_of(pod, tmp_path.as_uri(), chunk_size=2, decode=True)
    assert [sample["t"] for sample in found] == [b"a", b"", b"xyz"]
    (tmp_path / "index.json").unlink()
    (tmp_path / "a.jsonl").write_text("1")
    assert main(["index", str(tmp_path), "--format", "jsonl", "--force", "--allow-pickle"]) == 2
    assert "--allow-pickle is for mds and litdata, and this is read as jsonl" in capsys.readouterr().err


def test_only_below(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "train").mkdir()
    written(tmp_path / "train")
    assert main(["index", str(tmp_path)]) == 2
    assert f"index {tmp_path.as_uri()}/train" in capsys.readouterr().err


class TestParser:
    def parse(self, encoding: str, data: bytes, size: int | None = None) -> Any:
        head = b"" if size else struct.pack("<I", len(data))
        return make_parser({"columns": [["x", encoding, size]]})(memoryview(head + data), 7)[1]["x"]

    @pytest.mark.parametrize(
        ("encoding", "data"),
        [
            ("str", b"\xff"), ("str_int", b"x"), ("str_decimal", b"x"), ("json", b"{"), ("json", b"[" * 5000),
            ("ndarray", b""), ("ndarray", b"\xff"), ("ndarray", b"\x08\xff\xff"), ("ndarray:int32", b"\x05\x03aaaa"),
            ("ndarray:int32:2,2", b"aaaa"), ("pil", b""), ("pil", struct.pack("<3I", 2**32 - 1, 2**32 - 1, 3) + b"RGB"),
            ("pil", struct.pack("<3I", 1, 1, 2) + b"ZZ"), ("list[jpeg]", b"\0\0\0\0\xff\xff\xff\xff"),
            ("jpeg_array", b"\1\0\0\0\xff\0\0\0"), ("float32", b""), ("str_int", b"9" * 5000),
        ],
    )  # fmt: skip
    def test_what_can_not_be_decoded_names_the_column(self, encoding: str, data: bytes) -> None:
        with pytest.raises(SampleDamaged, match="sample 7 is no MDS sample, at its byte 4: column 'x'"):
            self.parse(encoding, data)

    def test_what_is_cut_off_or_too_long(self) -> None:
        parse = make_parser({"columns": [["x", "int", 8], ["y", "bytes", None]]})
        for data in (b"", struct.pack("<I", 9) + bytes(8), struct.pack("<I", 1) + bytes(10)):
            with pytest.raises(SampleDamaged, match="no MDS sample"):
                parse(memoryview(data), 0)

    def test_the_id_is_always_ours(self) -> None:
        parse = make_parser({"columns": [["__id__", "int", 8], ["__key__", "str", None]]})
        assert parse(memoryview(struct.pack("<I", 1) + bytes(8) + b"k"), 3) == ("k", {})
