"""Plain files and JSON lines, where they lie."""

from __future__ import annotations

import asyncio
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from refill.errors import EmptyDataset, SampleDamaged
from refill.formats.jsonl import make_parser
from refill_service.cli import main
from refill_service.datasets.index_shards import index_shards
from refill_service.demo.local_cluster import LocalCluster
from refill_service.formats import FORMAT_NAMES, jsonl
from refill_service.formats.interface import Options
from refill_service.formats.table import FORMATS
from tests.conftest import S3Server
from tests.formats.in_memory import parsed_in_memory
from tests.formats.reading import asked_of, bytes_at, epoch_of, opened, put


def photo(number: int, kind: str) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 255, (8, 6, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(out, format=kind)
    return out.getvalue()


def class_folders(folder: Path) -> list[tuple[bytes, int]]:
    """Photos in three folders; in the order of torchvision's ImageFolder."""
    made = []
    for place, name in enumerate(("cat", "dog", "emu")):
        (folder / name).mkdir(parents=True)
        for number in range(9):
            kind = ("JPEG", "PNG")[number % 2]
            data = photo(10 * place + number, kind)
            (folder / name / f"{number}.{kind.lower()}").write_bytes(data)
            made.append((data, place))
    (folder / ".hidden").write_bytes(b"x")
    return made


class TestPlainFiles:
    @pytest.mark.parametrize("key", ["index.json", "train/index.json"])
    def test_a_lone_index_of_others_is_no_dataset_of_one_sample(self, key: str) -> None:
        with pytest.raises(EmptyDataset, match=f"x/{key} has the name of the file that names the shards of MDS"):
            parsed_in_memory({key: b"damaged"}, Options())
        assert parsed_in_memory({key: b"taken as it is"}, Options(), "objects") == 1

    def test_class_folders(self, tmp_path: Path, pod: LocalCluster, capsys: Any) -> None:
        made = class_folders(tmp_path)
        assert main(["index", str(tmp_path)]) == 0
        said = capsys.readouterr().err
        assert "format objects: 27 plain files in 3 folders, which are classes, each a sample with field image" in said
        assert "each a GET an epoch" in said
        assert "`refill pack` joins neighbours" in said
        assert opened(tmp_path.as_uri())[0].metadata["classes"] == ["cat", "dog", "emu"]
        found = epoch_of(pod, tmp_path.as_uri(), chunk_size=1)
        assert [(sample["image"], sample["cls"]) for sample in found] == made
        found = epoch_of(pod, tmp_path.as_uri(), chunk_size=None, decode=True, as_tuple=None)
        for sample, (data, number) in zip(found, made, strict=True):
            assert np.array_equal(sample["image"], np.asarray(Image.open(io.BytesIO(data))))
            assert sample["cls"] == number

    def test_an_underscore_may_begin_a_class(self, tmp_path: Path) -> None:
        for name in ("_noise_", "yes", ".cache"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "0.wav").write_bytes(b"x")
        assert main(["index", str(tmp_path), "--quiet"]) == 0
        assert opened(tmp_path.as_uri())[0].metadata["classes"] == ["_noise_", "yes"]

    def test_one_kind_has_its_own_name(self, tmp_path: Path, pod: LocalCluster) -> None:
        made = [np.arange(number + 1) for number in range(12)]
        for number, each in enumerate(made):
            np.save(tmp_path / f"{number:02}.npy", each)
        assert main(["index", str(tmp_path), "--quiet", "--checksums", "all"]) == 0
        found = epoch_of(pod, tmp_path.as_uri(), chunk_size=1, decode=True)
        assert all(np.array_equal(sample["npy"], each) for sample, each in zip(found, made, strict=True))

    def test_what_torch_saved_is_a_sample_with_its_tensors(self, tmp_path: Path, pod: LocalCluster) -> None:
        made = [{"x": torch.arange(number + 1), "of": ["a", number]} for number in range(12)]
        for number, each in enumerate(made):
            torch.save(each, tmp_path / f"{number:02}.pt", _use_new_zipfile_serialization=number % 2 == 0)
        assert main(["index", str(tmp_path), "--quiet"]) == 0
        found = epoch_of(pod, tmp_path.as_uri(), chunk_size=1, decode=True)
        for sample, each in zip(found, made, strict=True):
            assert torch.equal(sample["pt"]["x"], each["x"])
            assert sample["pt"]["of"] == each["of"]

    def test_a_listing_is_all_that_is_read(
        self, tmp_path: Path, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class_folders(tmp_path)
        url = put(s3_environment, tmp_path)
        with asked_of(s3_environment) as asked:
            monkeypatch.setenv("AWS_ENDPOINT_URL", asked.url)
            assert main(["index", url, "--quiet"]) == 0
        assert [name for name, _ in asked.reads if name.endswith("eg") or name.endswith("png")] == []
        assert [name for name in asked.heads if "refill" not in name] == []

    @pytest.mark.parametrize(
        ("names", "says"),
        [
            (["a.jpg", "a.json"], "files of several kinds (1 .jpg, 1 .json)"),
            (["a.pkl"], "of pickles, which run as code"),
            (["a.array_record"], "is no ArrayRecord: it has 1 bytes"),
            (["a.h5"], "of HDF5"),
            (["a.jsonl.gz"], "decompress them first"),
            (["a.tfrecord.gz"], "decompress them first"),
            (["a.tar.gz"], "unpack them first"),
            (["a.xyz"], "nothing else that refill reads where it lies"),
            ([], "nothing else that refill reads where it lies: it is empty"),
            (["a.bin"], "but 1 that say nothing of what they are: of tokens, give --tokens"),
        ],
    )
    def test_what_is_refused(self, tmp_path: Path, capsys: Any, names: list[str], says: str) -> None:
        for name in names:
            (tmp_path / name).write_bytes(b"x")
        assert main(["index", str(tmp_path)]) == 2
        assert says in capsys.readouterr().err
        assert not (tmp_path / "refill.index").exists()

    def test_what_is_unknown_is_read_when_it_is_asked_for(self, tmp_path: Path) -> None:
        (tmp_path / "a.xyz").write_bytes(b"x")
        assert main(["index", str(tmp_path), "--format", "objects", "--quiet"]) == 0
        assert bytes_at(tmp_path) == [b"x"]


class TestJsonLines:
    @pytest.mark.parametrize(("key", "said"), [(17, "17"), ("doc", "doc"), (None, "0")])
    def test_a_number_may_be_the_key(self, tmp_path: Path, pod: LocalCluster, key: object, said: str) -> None:
        (tmp_path / "a.jsonl").write_text(json.dumps({"__key__": key, "a": 1}) + "\n")
        assert main(["index", str(tmp_path), "--quiet"]) == 0
        (found,) = epoch_of(pod, tmp_path.as_uri(), chunk_size=1)
        assert (found["__key__"], found["a"]) == (said, 1)

    @pytest.mark.parametrize("range_bytes", [50, 8 << 20])
    def test_each_line_is_a_sample(
        self, tmp_path: Path, pod: LocalCluster, monkeypatch: pytest.MonkeyPatch, range_bytes: int
    ) -> None:
        monkeypatch.setattr(jsonl, "_RANGE_BYTES", range_bytes)
        made = random.Random(1)
        rows: list[Any] = [{"n": number, "text": "é" * made.randrange(60)} for number in range(40)]
        rows += [[1, 2], "x", None, 3.5]
        lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
        (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines[:20]) + b"\n\n  \r\n" + b"\r\n".join(lines[20:30]))
        (tmp_path / "b.jsonl").write_bytes(b"\n" + b"\n".join(lines[30:]) + b"\n")
        assert main(["index", str(tmp_path), "--quiet"]) == 0
        assert [data.rstrip() for data in bytes_at(tmp_path)] == lines
        found = epoch_of(pod, tmp_path.as_uri())
        assert [sample.get("json", {k: v for k, v in sample.items() if k[0] != "_"}) for sample in found] == rows

    def test_a_line_that_is_no_json(self) -> None:
        for line in (b"{", b"\xff", b"[" * 100_000, b"9" * 5000):
            with pytest.raises(SampleDamaged, match="sample 3 is no line of JSON"):
                make_parser({})(memoryview(line), 3)

    def test_one_that_is_compressed(self, tmp_path: Path, capsys: Any) -> None:
        (tmp_path / "a.jsonl").write_bytes(b"\x1f\x8b" + b"x" * 100)
        assert main(["index", str(tmp_path)]) == 2
        assert "a.jsonl: can't be read from byte 0 on (of 102): it is compressed" in capsys.readouterr().err


def test_the_table_has_each_name() -> None:
    assert tuple(FORMATS) == FORMAT_NAMES
    assert all(name == each.NAME for name, each in FORMATS.items())


def test_an_unknown_format_is_refused_with_those_that_there_are(tmp_path: Path, capsys: Any) -> None:
    assert main(["index", str(tmp_path), "--format", "zarr"]) == 2
    assert f"there is no format 'zarr'; there are {', '.join(FORMAT_NAMES)}" in capsys.readouterr().err


def test_processes_find_what_threads_find(tmp_path: Path) -> None:
    for place in range(3):
        lines = [json.dumps({"n": number}).encode() for number in range(100 * place + 5)]
        (tmp_path / f"{place}.jsonl").write_bytes(b"\n".join(lines))
    found = []
    for in_processes in (False, True):
        asyncio.run(index_shards(tmp_path.as_uri(), jobs=2, in_processes=in_processes, force=True))
        found.append((tmp_path / "refill.index").read_bytes())
    assert found[0] == found[1]
