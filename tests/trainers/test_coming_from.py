"""Do the examples of docs/COMING_FROM.md train on what the other loaders' writers write, each sample once?"""

from __future__ import annotations

import io
import re
import runpy
import sys
import tarfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.formats import peers

from refill_service.cli import main
from refill_service.demo.local_cluster import LocalCluster

ROOT = Path(__file__).parents[2]
NUM_SAMPLES = 70


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(2, tmp_path_factory.mktemp("pods"), {"memory_bytes": "32MiB", "wait_seconds": 1}) as cluster:
        yield cluster


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 255, (8, 6, 3)).astype(np.uint8))


def coded(number: int, kind: str = "JPEG") -> bytes:
    out = io.BytesIO()
    picture(number).save(out, format=kind)
    return out.getvalue()


def mosaicml(folder: Path) -> list[list[str]]:
    columns = {"image": "jpeg", "label": "int"}
    with peers.mosaicml().MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=20_000) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"image": Image.open(io.BytesIO(coded(number))), "label": number % 3})
    return [["index", str(folder / "mds")]]


def litdata(folder: Path) -> list[list[str]]:
    peers.litdata()
    from litdata.streaming.writer import BinaryWriter

    (folder / "chunks").mkdir()
    writer = BinaryWriter(str(folder / "chunks"), chunk_size=16)
    for number in range(NUM_SAMPLES):
        writer[number] = {"image": picture(number), "label": number % 3}
    writer.done()
    writer.merge()
    return [["index", str(folder / "chunks")]]


def webdataset(folder: Path) -> list[list[str]]:
    """As its ShardWriter writes them, which may not be installed."""
    (folder / "shards").mkdir()
    for shard in range(5):
        with tarfile.open(folder / "shards" / f"{shard:06}.tar", "w") as tar:
            for number in range(shard, NUM_SAMPLES, 5):
                for name, data in (("jpg", coded(number)), ("cls", str(number % 3).encode())):
                    info = tarfile.TarInfo(f"{number:06}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return [["index", str(folder / "shards")]]


def imagefolder(folder: Path) -> list[list[str]]:
    for number in range(NUM_SAMPLES):
        of_class = folder / "train" / ("cat", "dog", "emu")[number % 3]
        of_class.mkdir(parents=True, exist_ok=True)
        (of_class / f"{number}.jpg").write_bytes(coded(number))
    return [["pack", str(folder / "train"), str(folder / "out"), "--blob-size", "40kB"]]


def huggingface(folder: Path) -> list[list[str]]:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    rows = {
        "image": [{"bytes": coded(number, "PNG"), "path": None} for number in range(NUM_SAMPLES)],
        "label": [number % 3 for number in range(NUM_SAMPLES)],
    }
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder / "rows")
    return [["pack", str(folder / "rows"), str(folder / "out"), "--blob-size", "40kB"]]


def nanogpt(folder: Path) -> list[list[str]]:
    (folder / "tokens").mkdir()
    np.arange(NUM_SAMPLES * 1024 + 1, dtype=np.uint16).tofile(folder / "tokens" / "train.bin")
    return [
        ["index", str(folder / "tokens"), "--tokens", "1025", "--stride", "1024", "--dtype", "uint16"],
    ]


WAYS: dict[str, Callable[[Path], list[list[str]]]] = {
    "from_mosaicml": mosaicml,
    "from_litdata": litdata,
    "from_webdataset": webdataset,
    "from_imagefolder": imagefolder,
    "from_huggingface_datasets": huggingface,
    "from_nanogpt": nanogpt,
}


@pytest.mark.variants("from_huggingface_datasets", "from_imagefolder")
@pytest.mark.parametrize("name", WAYS)
def test_the_example_trains_on_it(
    name: str, pods: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    (command,) = WAYS[name](tmp_path)
    assert main([*command, "--quiet"]) == 0
    place = Path(command[2] if command[0] == "pack" else command[1]).as_uri()
    url, job = pods.pod_urls[0], f"job-{uuid.uuid4().hex[:8]}"
    monkeypatch.setattr(sys, "argv", [name, url, place, job])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    said = capfd.readouterr().out
    for epoch in range(2):
        assert f"epoch {epoch}: {NUM_SAMPLES} samples" in said
        receipt = httpx.get(f"{url}/v1/jobs/{job}/epochs/{epoch}/receipt").json()
        assert receipt["exact"], receipt


def test_the_page_shows_what_the_examples_do() -> None:
    page = (ROOT / "docs" / "COMING_FROM.md").read_text()
    shown = re.findall(r"`examples/(\w+)\.py`:\n```python\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in shown] == list(WAYS)
    for name, text in shown:
        example = (ROOT / "examples" / f"{name}.py").read_text()
        assert text in example, f"the page shows other lines than examples/{name}.py has"
        assert f"    refill {'pack' if 'pack' in example.partition('python')[0] else 'index'}" in page
