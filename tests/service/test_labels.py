"""Labels from `pack` and `index` to `dataset.labels`, `inspect` and the choice of K, without reading a sample."""

from __future__ import annotations

import asyncio
import json
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refill.errors import IndexDamaged, InvalidInput
from refill_service.cli import main
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.index_shards import index_shards
from refill_service.datasets.pack import pack
from refill_service.datasets.write_columns import asked_column, write_columns

CLASSES = ("bird", "cat", "dog")


def class_folders(folder: Path, each: int = 20) -> None:
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for i in range(each):
            (folder / name / f"{i}.txt").write_text(name)


def shards_by_class(folder: Path, samples: int = 1500, shards: int = 3) -> None:
    for shard in range(shards):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for i in range(shard * samples, (shard + 1) * samples):
                for extension, content in (("txt", b"x" * 50), ("cls", b"%d\n" % (i // 100))):
                    info = tarfile.TarInfo(f"{i:06}.{extension}")
                    info.size = len(content)
                    tar.addfile(info, BytesIO(content))


def opened(folder: Path, use: Any) -> Any:
    async def run() -> Any:
        dataset = await Dataset.open(folder.as_uri())
        try:
            return await use(dataset)
        finally:
            await dataset.close()

    return asyncio.run(run())


async def truth(dataset: Dataset) -> list[int]:
    """What each sample says itself."""
    records = await dataset.load_records(0, dataset.num_samples)
    found = []
    for sample in range(dataset.num_samples):
        data = bytes(await dataset.read_samples(records, sample, sample + 1))
        with tarfile.open(fileobj=BytesIO(data + bytes(1024))) as tar:
            (member,) = [each for each in tar if each.name.endswith(".cls")]
            found.append(int(tar.extractfile(member).read()))  # type: ignore[union-attr]
    return found


def labels_of(folder: Path) -> list[Path]:
    """Objects that hold labels."""
    return list(folder.glob("refill.column.cls.*"))


async def classes_in_pieces(dataset: Dataset) -> int | None:
    return dataset.classes_in_pieces


async def all_labels(dataset: Dataset) -> list[int]:
    return (await dataset.labels(0, dataset.num_samples)).tolist()


def test_pack_writes_what_its_samples_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class_folders(tmp_path / "files")
    (tmp_path / "files" / "cat" / "3.cls").write_text("9")  # its own
    store = tmp_path / "store"
    asyncio.run(pack(str(tmp_path / "files"), store.as_uri(), blob_bytes=20_000))
    labels = opened(store, all_labels)
    assert labels == opened(store, truth)
    assert sorted(labels).count(9) == 1
    assert main(["inspect", str(store)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "labels 4 different, 1 to 20 samples each;" in shown
    assert "by chance)" in shown
    assert "stored by class" not in shown, "pack shuffles"
    assert opened(store, classes_in_pieces) == 0
    asyncio.run(pack(str(tmp_path / "files"), store.as_uri(), classes="no", force=True))
    assert not labels_of(store), "labels of the dataset that was replaced are left"
    with pytest.raises(InvalidInput, match="has no labels: not each of its samples has a member cls"):
        opened(store, all_labels)
    assert opened(store, classes_in_pieces) == 0, "it was shuffled all the same"
    asyncio.run(index_shards(store.as_uri(), force=True))
    assert opened(store, classes_in_pieces) is None, "whoever indexes it may have written it in any order"


def test_shards_stored_by_class_are_recognised_and_read_in_small_chunks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards_by_class(tmp_path)
    asyncio.run(index_shards(tmp_path.as_uri()))
    assert opened(tmp_path, all_labels) == [i // 100 for i in range(4500)]
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    inspected = json.loads(capsys.readouterr().out)
    assert (inspected["labels"]["classes"], inspected["by_class"], inspected["default_chunk_size"]) == (45, True, 8)
    assert main(["inspect", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "99% of neighbours share one (2% by chance)" in shown
    assert "8 where ranks list the order, since it is stored by class" in shown
    assert main(["analyze", str(tmp_path), "--chunk-sizes", "8", "--redox-chunk-sizes", "64"]) == 0
    assert "of 45 classes one after another" in capsys.readouterr().out


def test_without_labels_nothing_is_said_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "files").mkdir()
    for i in range(10):
        (tmp_path / "files" / f"{i}.txt").write_text("x")
    (tmp_path / "files" / "3.cls").write_text("1")  # one sample alone
    asyncio.run(pack(str(tmp_path / "files"), (tmp_path / "store").as_uri()))
    assert not labels_of(tmp_path / "store")
    assert main(["inspect", str(tmp_path / "store"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["labels"] is None


def test_ids_stay_when_a_shard_is_added_at_the_end_and_change_when_a_folder_is_packed_anew(tmp_path: Path) -> None:
    shards_by_class(tmp_path, samples=200)
    asyncio.run(index_shards(tmp_path.as_uri()))
    before = opened(tmp_path, truth)
    (tmp_path / "3.tar").write_bytes((tmp_path / "0.tar").read_bytes())
    asyncio.run(index_shards(tmp_path.as_uri(), force=True))
    assert opened(tmp_path, truth) == before + before[:200]
    class_folders(tmp_path / "files")
    store = tmp_path / "store"
    asyncio.run(pack(str(tmp_path / "files"), store.as_uri()))
    packed = opened(store, truth)
    asyncio.run(pack(str(tmp_path / "files"), store.as_uri(), force=True))
    assert opened(store, truth) == packed, "the same files have other ids"
    (tmp_path / "files" / "cat" / "new.txt").write_text("cat")
    asyncio.run(pack(str(tmp_path / "files"), store.as_uri(), force=True))
    again = opened(store, truth)
    assert sorted(again) == sorted([*packed, 1])
    assert again[:-1] != packed, "QUESTIONS.md says that ids change"


def test_labels_that_are_gone_or_of_another_index_are_named(tmp_path: Path) -> None:
    for part, each in (("a", 20), ("b", 21)):
        class_folders(tmp_path / part, each)
        asyncio.run(pack(str(tmp_path / part), (tmp_path / f"store-{part}").as_uri()))
    (labels,), (others,) = (labels_of(tmp_path / f"store-{part}") for part in "ab")
    labels.write_bytes(others.read_bytes())
    with pytest.raises(IndexDamaged, match="is damaged, or no column of this index"):
        opened(tmp_path / "store-a", all_labels)
    labels.unlink()
    with pytest.raises(InvalidInput, match="has no column 'cls'"):
        opened(tmp_path / "store-a", all_labels)


def test_the_column_of_the_labels_is_not_written_over(tmp_path: Path) -> None:
    class_folders(tmp_path / "files")
    asyncio.run(pack(str(tmp_path / "files"), (tmp_path / "store").as_uri()))
    with pytest.raises(InvalidInput, match=r"--column cls: this column has the labels of .* already; name yours"):
        asyncio.run(write_columns((tmp_path / "store").as_uri(), [asked_column("cls=other.npy")]))


def test_labels_are_beside_the_index(tmp_path: Path) -> None:
    class_folders(tmp_path / "files")
    asyncio.run(pack(str(tmp_path / "files"), (tmp_path / "store").as_uri()))

    async def look(dataset: Dataset) -> None:
        header = dataset.index.header
        assert (tmp_path / "store" / "refill.index").stat().st_size == header.index_bytes
        assert set(dataset.index.metadata) == {"made_by", "seed", "classes", "num_files", "labels"}
        np.testing.assert_array_equal((await dataset.labels(7, 31)), np.array(await all_labels(dataset))[7:31])

    opened(tmp_path / "store", look)
