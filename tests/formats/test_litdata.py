"""LitData's chunks, where they lie: held against litdata's own writer and reader."""

from __future__ import annotations

import json
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from refill.errors import SampleDamaged
from refill.formats.litdata import make_parser
from refill_service.cli import main
from refill_service.demo.local_cluster import LocalCluster
from tests.conftest import S3Server
from tests.formats import peers
from tests.formats.reading import asked_of, bytes_at, epoch_of, put

NUM_SAMPLES = 30


def picture(number: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 255, (5, 4 + number % 3, 3)).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def item(number: int) -> dict[str, Any]:
    return {
        "number": number - 3,
        "share": number / 7,
        "is_even": number % 2 == 0,
        "text": "é" * (number % 5),
        "raw": b"x" * (number % 4),
        "tensor": torch.arange(6, dtype=torch.int32).reshape(2, 3) + number,
        "row": torch.arange(number % 5 + 1, dtype=torch.float32),
        "array": np.full((2, 2), number, dtype=np.uint16),
        "flat": np.arange(number % 3 + 1),
        "picture": picture(number, "RGB" if number % 2 else "L"),
        "meta": {"id": number, "list": [1, "x"], "words": ["a", "b"], "numbers": [number, 2]},
    }


def write(folder: Path, items: list[Any], **more: Any) -> Any:
    peers.litdata()
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir(exist_ok=True)
    writer = BinaryWriter(str(folder), **({"chunk_size": 8} | more))
    for number, each in enumerate(items):
        writer[number] = each
    writer.done()
    writer.merge()
    return json.loads((folder / "index.json").read_text())


def peer_samples(folder: Path, count: int, **more: Any) -> list[Any]:
    from litdata.streaming.cache import Cache

    cache = Cache(str(folder), chunk_size=8, **more)
    return [cache[number] for number in range(count)]


def flat(value: Any, above: str = "") -> dict[str, Any]:
    """As our fields are named; lists of single values that litdata keeps in one leaf are one."""
    if isinstance(value, dict):
        return {
            k: v for name, each in value.items() for k, v in flat(each, f"{above}.{name}" if above else name).items()
        }
    return {above: value}


def same(ours: Any, theirs: Any, name: str) -> None:
    if isinstance(theirs, torch.Tensor):
        theirs = theirs.numpy()
    if isinstance(theirs, Image.Image):
        theirs = np.asarray(theirs)
    if isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
        assert np.array_equal(ours, theirs), name
    else:
        assert type(ours) is type(theirs), name
        assert ours == theirs, name


def test_as_its_own_reader_has_it(tmp_path: Path, pod: LocalCluster, capsys: Any) -> None:
    made = [item(number) for number in range(NUM_SAMPLES)]
    write(tmp_path, made)
    assert main(["index", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "format litdata: index.json names 4 chunks of LitData with leaves number (int), share (float)" in said
    assert "read are headers alone" in said
    found = epoch_of(pod, tmp_path.as_uri(), decode=True)
    theirs = peer_samples(tmp_path, NUM_SAMPLES)
    for ours, their in zip(found, theirs, strict=True):
        their = flat(their)
        assert set(ours) - {"__id__", "__key__"} == set(their)
        for name, value in their.items():
            same(ours[name], value, name)


def test_photos(tmp_path: Path, pod: LocalCluster) -> None:
    """litdata reads them by torchvision, so these are held against what was written."""
    files = [tmp_path / f"{number}.jpeg" for number in range(12)]
    for number, file in enumerate(files):
        picture(number).save(file)
    folder = tmp_path / "written"
    write(folder, [{"photo": Image.open(file), "n": number} for number, file in enumerate(files)])
    assert main(["index", str(folder), "--quiet"]) == 0
    found = epoch_of(pod, folder.as_uri(), chunk_size=4)
    assert [sample["photo"] for sample in found] == [file.read_bytes() for file in files]


def test_media_are_the_bytes_of_their_files(tmp_path: Path, pod: LocalCluster) -> None:
    peers.litdata()
    from litdata import types

    made = [random.Random(number).randbytes(50 + number) for number in range(10)]
    media = ("Video", "Audio", "Mesh", "Pdf", "Tiff", "Nifti")
    endings = ("mkv", "flac", "ply", "pdf", "tiff", "nii.gz")
    items = [
        {
            name: getattr(types, name)(bytes=data, path=f"x.{ending}")
            for name, ending in zip(media, endings, strict=True)
        }
        for data in made
    ]
    write(tmp_path, items)
    assert main(["index", str(tmp_path), "--quiet"]) == 0
    for sample, data in zip(epoch_of(pod, tmp_path.as_uri(), chunk_size=2), made, strict=True):
        assert [sample[name] for name in media] == [data] * len(media)
    cut = epoch_of(pod, tmp_path.as_uri(), chunk_size=2, members=["Video"], ranges={"Video": (3, 10)})
    assert [sample["Video"] for sample in cut] == [data[3:13] for data in made]


@pytest.mark.parametrize("shape", ["tuple", "one"])
def test_tuples_and_single_leaves(tmp_path: Path, pod: LocalCluster, shape: str) -> None:
    arrays = [np.full((2, number + 1), number, np.float32) for number in range(10)]
    write(tmp_path, [(number, each) if shape == "tuple" else each for number, each in enumerate(arrays)])
    assert main(["index", str(tmp_path), "--quiet"]) == 0
    for number, (ours, array) in enumerate(zip(epoch_of(pod, tmp_path.as_uri(), chunk_size=4), arrays, strict=True)):
        same(ours["1" if shape == "tuple" else "data"], array, shape)
        assert shape == "one" or ours["0"] == number


@pytest.mark.parametrize("kind", ["tensor", "numpy"])
def test_numbers_of_a_type_that_is_not_read_are_named(kind: str) -> None:
    parse = make_parser({"leaves": [["x", kind]]})
    data = struct.pack(">II" if kind == "tensor" else "<II", 10_000, 0) + bytes(8)
    with pytest.raises(SampleDamaged, match=r"leaf 'x' can't be decoded: .*its numbers are complex, bfloat16 or"):
        parse(memoryview(struct.pack("<I", len(data)) + data), 0)


def test_tokens(tmp_path: Path, pod: LocalCluster, capsys: Any) -> None:
    litdata = peers.litdata()
    documents = [torch.arange(number * 100, number * 100 + 90 + number, dtype=torch.int32) for number in range(20)]
    write(tmp_path, documents, item_loader=litdata.TokensLoader(), chunk_size=1000)
    assert main(["index", str(tmp_path)]) == 2
    assert "chunks of tokens, int32: --tokens N says" in capsys.readouterr().err
    assert main(["index", str(tmp_path), "--tokens", "64"]) == 0
    assert "read are none of their bytes" in capsys.readouterr().err
    found = epoch_of(pod, tmp_path.as_uri())
    loader = litdata.TokensLoader(block_size=64)
    from litdata.streaming.cache import Cache

    cache = Cache(str(tmp_path), chunk_size=8, item_loader=loader)
    theirs = [cache[number] for number in range(len(found))]
    assert len(found) == sum(each["dim"] // 64 for each in json.loads((tmp_path / "index.json").read_text())["chunks"])
    for ours, their in zip(found, theirs, strict=True):
        assert np.array_equal(ours["tokens"], their.numpy())


def test_two_requests_and_a_thousandth_of_the_bytes(
    tmp_path: Path, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [{"n": number, "x": np.full(20_000, number, np.uint8)} for number in range(150)], chunk_size=50)
    url = put(s3_environment, tmp_path)
    with asked_of(s3_environment) as asked:
        monkeypatch.setenv("AWS_ENDPOINT_URL", asked.url)
        assert main(["index", url, "--quiet"]) == 0
    chunks = sorted(path.name for path in tmp_path.glob("*.bin"))
    assert len(chunks) == 3
    for name in chunks:
        requests, num_bytes = asked.of(name)
        assert requests <= 2
        assert num_bytes <= (tmp_path / name).stat().st_size / 1000


class TestRefusals:
    def said(self, folder: Path, capsys: Any) -> str:
        assert main(["index", str(folder)]) == 2
        assert not (folder / "refill.index").exists()
        return str(capsys.readouterr().err)

    def test_rows_of_arrow(self, tmp_path: Path, capsys: Any) -> None:
        pytest.importorskip("pyarrow")
        write(tmp_path, [{"text": f"row {number}"} for number in range(10)])
        said = self.said(tmp_path, capsys)
        assert "stored as Arrow" in said
        assert "write them as JSON lines" in said

    # Without the peer: an index as it writes it.

    def written(self, folder: Path, change: Any = lambda index: None, at: int = 0, value: bytes = b"") -> None:
        rows = [struct.pack("<IIq", 8, len(text), number) + text for number, text in enumerate((b"a", b"", b"xyz"))]
        ends = np.cumsum([20, *map(len, rows)]).astype("<u4")
        data = bytearray(struct.pack("<I", 3) + ends.tobytes() + b"".join(rows))
        data[at : at + len(value)] = value
        leaf = {"type": None, "context": None, "children_spec": []}
        spec = {"type": "builtins.dict", "context": '["n", "t"]', "children_spec": [leaf, leaf]}
        config = {
            "compression": None, "encryption": None, "item_loader": "PyTreeLoader", "data_format": ["int", "str"],
            "data_spec": json.dumps([1, spec]),
        }  # fmt: skip
        chunk = {"filename": "chunk-0-0.bin", "chunk_bytes": len(data), "chunk_size": 3, "dim": None}
        index = {"chunks": [chunk], "config": config}
        change(index)
        (folder / "index.json").write_text(json.dumps(index))
        (folder / "chunk-0-0.bin").write_bytes(data)

    def test_an_independent_writer(self, tmp_path: Path) -> None:
        self.written(tmp_path)
        assert main(["index", str(tmp_path), "--quiet"]) == 0
        parse = make_parser({"leaves": [["n", "int"], ["t", "str"]]})
        fields = [parse(memoryview(data), 0)[1] for data in bytes_at(tmp_path)]
        assert fields == [{"n": 0, "t": "a"}, {"n": 1, "t": ""}, {"n": 2, "t": "xyz"}]

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"compression": "zstd"}, "compressed (zstd)"),
            ({"encryption": {"algorithm": "fernet"}}, "encrypted"),
            ({"ipc_compression": "zstd"}, "stored as Arrow"),
            ({"data_format": ["int", "pickle"]}, "holds pickles, which run as code"),
            ({"data_format": ["int", "graph"]}, "doesn't know leaves of kind 'graph'"),
            ({"data_format": ["int", "hologram"]}, "doesn't know leaves of kind 'hologram'"),
            ({"data_format": ["int", "no_header_numpy:14"]}, "doesn't know leaves of kind"),
            ({"data_format": ["int"]}, "data_spec has 2 leaves, and data_format 1"),
            ({"data_spec": "[1, {}]"}, "describes no tree"),
            ({"data_spec": "[" * 5000}, "describes no tree"),
            ({"item_loader": "Other"}, "item loader 'Other'"),
        ],
    )
    def test_by_name(self, tmp_path: Path, capsys: Any, change: dict[str, Any], says: str) -> None:
        self.written(tmp_path, lambda index: index["config"].update(change))
        assert says in self.said(tmp_path, capsys)

    @pytest.mark.parametrize(
        ("at", "value", "says"),
        [(0, b"\4", "says that it holds 4"), (4, b"\1", "sample 0 can't begin"), (16, b"\xff", "its samples end")],
    )
    def test_a_damaged_chunk(self, tmp_path: Path, capsys: Any, at: int, value: bytes, says: str) -> None:
        self.written(tmp_path, at=at, value=value)
        assert f"chunk-0-0.bin: can't be read from byte {at}" in (said := self.said(tmp_path, capsys))
        assert says in said

    def test_names_lead_out_of_nothing(self, tmp_path: Path, capsys: Any) -> None:
        self.written(tmp_path, lambda index: index["chunks"][0].update(filename="../x"))
        assert "'../x', and it is not there" in self.said(tmp_path, capsys)


def test_pickles_that_are_let_in_are_bytes_until_the_caller_runs_them(tmp_path: Path, pod: LocalCluster) -> None:
    write(tmp_path, [{"n": number, "odd": {1, number}} for number in range(NUM_SAMPLES)])
    assert main(["index", str(tmp_path), "--quiet"]) == 2
    assert main(["index", str(tmp_path), "--quiet", "--allow-pickle"]) == 0
    found = epoch_of(pod, tmp_path.as_uri(), decode=True)
    assert [pickle.loads(sample["odd"]) for sample in found] == [{1, number} for number in range(NUM_SAMPLES)]
    found = epoch_of(pod, tmp_path.as_uri(), decode={"pkl": pickle.loads})
    assert [sample["odd"] for sample in found] == [{1, number} for number in range(NUM_SAMPLES)]


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("int", b"1"), ("str", b"\xff"), ("tensor", b"\0" * 7), ("tensor", struct.pack(">II", 17, 2**32 - 1)),
        ("tensor", struct.pack(">III", 17, 1, 9)), ("numpy", struct.pack("<II", 99, 1)),
        ("json", b"\1\xff\xff\xff\xff"),
        ("json", b"\6" + b"\xff" * 8), ("json", b"{"), ("json", b"\5\1\0\0\0\1\0\0\0a" * 5000), ("json", b"\x0c"),
        ("pil", struct.pack("<3I", 2**31, 2**31, 1) + b"L"), ("no_header_numpy:3", b"123"), ("bool", b""),
    ],
)  # fmt: skip
def test_what_can_not_be_decoded_names_the_leaf(kind: str, data: bytes) -> None:
    parse = make_parser({"leaves": [["x", kind]]})
    with pytest.raises(SampleDamaged, match="sample 7 is no LitData sample, at its byte 4: leaf 'x'"):
        parse(memoryview(struct.pack("<I", len(data)) + data), 7)
