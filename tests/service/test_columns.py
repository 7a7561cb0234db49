"""`refill index --column`: columns of files and of fields, beside an index that stays as it is."""

from __future__ import annotations

import asyncio
import json
import math
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refill.errors import IndexDamaged, InvalidInput
from refill.protocol.column_values import BLOCK_VALUES, decode_values
from refill_service.cache_core.dataset_index import INDEX_KEY, column_key
from refill_service.cli import main
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.write_columns import asked_column, write_columns


def tars(folder: Path, samples: int = 30, shards: int = 2, **said: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard * samples, (shard + 1) * samples):
                about: dict[str, Any] = {"score": number / 10, "width": number, "name": f"n{number}"} | said
                for extension, content in (
                    ("txt", f"text {number}".encode()),
                    ("json", json.dumps(about).encode()),
                    ("cls", b"%d" % (number % 3)),
                ):
                    info = tarfile.TarInfo(f"{'cat' if number % 2 else 'dog'}/{number:04}.{extension}")
                    info.size = len(content)
                    tar.addfile(info, BytesIO(content))


def column_of(folder: Path, name: str, block: int = 0) -> Any:
    async def run() -> Any:
        dataset = await Dataset.open(folder.as_uri())
        try:
            body = await dataset.column(name, block)
            return decode_values(body, min(BLOCK_VALUES, dataset.num_samples - block * BLOCK_VALUES))
        finally:
            await dataset.close()

    return asyncio.run(run())


def fingerprint_of(folder: Path) -> int:
    async def run() -> int:
        dataset = await Dataset.open(folder.as_uri())
        await dataset.close()
        return dataset.index.fingerprint

    return asyncio.run(run())


def test_columns_of_fields_of_tars_with_the_index_or_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tars(tmp_path)
    names = ["__key__", "cls", "json.score", "json.width", "json.name", "txt"]
    assert main(["index", str(tmp_path), "--quiet", *[f"--column={name}" for name in names]]) == 0
    said = capsys.readouterr().out
    assert "column cls: whole numbers, beside the index" in said
    assert "column json.score: numbers" in said
    assert "column json.name: text" in said
    assert column_of(tmp_path, "__key__") == [f"{'cat' if n % 2 else 'dog'}/{n:04}" for n in range(60)]
    assert column_of(tmp_path, "json.name") == [f"n{n}" for n in range(60)]
    assert column_of(tmp_path, "txt") == [f"text {n}" for n in range(60)]
    np.testing.assert_array_equal(column_of(tmp_path, "json.score"), np.arange(60) / 10)
    widths = column_of(tmp_path, "json.width")
    assert (widths.dtype, widths.tolist()) == (np.dtype(np.int64), list(range(60)))
    before = (tmp_path / INDEX_KEY).read_bytes()
    assert main(["index", str(tmp_path), "--quiet", "--column", "json.width"]) == 0, "the index is there"
    assert (tmp_path / INDEX_KEY).read_bytes() == before
    assert main(["index", str(tmp_path), "--quiet", "--force"]) == 0, "columns are taken for samples"
    assert (tmp_path / INDEX_KEY).read_bytes() == before


def test_columns_of_files_are_of_any_kind_and_any_length(tmp_path: Path) -> None:
    for number in range(BLOCK_VALUES // 4096 + 1):
        (tmp_path / f"{number}.jsonl").write_text("".join(f'{{"a": {i}}}\n' for i in range(4096)))
    count = 4096 * (BLOCK_VALUES // 4096 + 1)
    values = {
        "f32": np.random.default_rng(1).random(count).astype(np.float32),
        "u8": np.arange(count).astype(np.uint8),
        "yes": np.arange(count) % 2 == 0,
        "text": np.array([f"é{i}" for i in range(count)]),
    }
    for name, each in values.items():
        np.save(tmp_path / f"{name}.npy", each)
    files = [f"--column={name}={tmp_path / name}.npy" for name in values]
    assert main(["index", str(tmp_path), "--format", "jsonl", "--quiet", "--column", "a", *files]) == 0
    for name, each in values.items():
        found = [*column_of(tmp_path, name), *column_of(tmp_path, name, 1)]
        assert found == each.tolist(), name
    assert column_of(tmp_path, "a", 1).tolist() == list(range(4096))


def test_what_a_sample_lacks_is_nan_or_empty(tmp_path: Path) -> None:
    lines = ['{"b": 1}', '{"a": 2, "t": "x"}', '{"a": null}', '{"a": 3.5, "t": "y"}']
    (tmp_path / "0.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["index", str(tmp_path), "--quiet", "--column", "a", "--column", "t"]) == 0
    assert column_of(tmp_path, "t") == ["", "x", "", "y"]
    found = column_of(tmp_path, "a").tolist()
    assert [math.isnan(each) for each in found] == [True, False, True, False]
    assert (found[1], found[3]) == (2.0, 3.5)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([2**53 + 1, None], "sample 0 has 9007199254740993, which would be rounded"),
        ([1, 2**63 + 1], "sample 1 has 9223372036854775809"),
        ([1, 10**400], "sample 1 has 1000"),
    ],
)
def test_a_number_that_would_be_rounded_is_refused(tmp_path: Path, numbers: list[int | None], said: str) -> None:
    (tmp_path / "0.jsonl").write_text("".join(json.dumps({"a": each}) + "\n" for each in numbers))
    assert main(["index", str(tmp_path), "--quiet"]) == 0
    with pytest.raises(InvalidInput, match=said):
        asyncio.run(write_columns(tmp_path.as_uri(), [asked_column("a")]))


def test_large_whole_numbers_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text(f'{{"a": {2**53 + 1}}}\n{{"a": {-(2**63)}}}\n')
    assert main(["index", str(tmp_path), "--quiet", "--column", "a"]) == 0
    assert column_of(tmp_path, "a").tolist() == [2**53 + 1, -(2**63)]


def test_a_column_of_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"url": [f"u{i}" for i in range(50)], "score": [i / 4 for i in range(50)]})
    parquet.write_table(table, tmp_path / "0.parquet", row_group_size=20)
    assert main(["index", str(tmp_path), "--quiet", "--column", "url", "--column", "score"]) == 0
    assert column_of(tmp_path, "url") == [f"u{i}" for i in range(50)]
    assert column_of(tmp_path, "score").tolist() == [i / 4 for i in range(50)]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("nothing", "no sample has such a field"),
        ("a/b", "write NAME, a field of the samples, or NAME=FILE.npy"),
        ("x=scores.csv", "NAME=FILE.npy"),
        ("x=nowhere.npy", "can't be read"),
        ("x={short}", "holds float64 of shape \\(3,\\), and the dataset has 60 samples"),
        ("json", "sample 0 has a dict; a column is numbers or text"),
        ("json.mixed", "sample 1 has text, and samples before have the other"),
    ],
)
def test_what_is_no_column_is_refused_in_a_line(tmp_path: Path, column: str, said: str) -> None:
    tars(tmp_path / "data")
    np.save(tmp_path / "short.npy", np.zeros(3))
    with tarfile.open(tmp_path / "data" / "0.tar", "w") as tar:
        for number, mixed in enumerate([1, "x"] * 15):
            content = json.dumps({"mixed": mixed}).encode()
            info = tarfile.TarInfo(f"{number}.json")
            info.size = len(content)
            tar.addfile(info, BytesIO(content))
    assert main(["index", str(tmp_path / "data"), "--quiet"]) == 0
    url = (tmp_path / "data").as_uri()
    with pytest.raises(InvalidInput, match=said):
        asyncio.run(write_columns(url, [asked_column(column.format(short=tmp_path / "short.npy"))]))
    assert not [path for path in (tmp_path / "data").iterdir() if "column" in path.name], "something was written"


def test_columns_are_of_one_version_and_go_with_it(tmp_path: Path) -> None:
    tars(tmp_path, shards=1)
    assert main(["index", str(tmp_path), "--quiet", "--column", "json.width"]) == 0
    first = fingerprint_of(tmp_path)
    tars(tmp_path, shards=2)
    assert main(["index", str(tmp_path), "--quiet", "--append"]) == 0
    assert (tmp_path / column_key("json.width", first)).exists(), "jobs of the version before have lost their column"
    with pytest.raises(
        InvalidInput, match=r"has no column 'json.width', not in this version of it: write it by refill index"
    ):
        column_of(tmp_path, "json.width")
    assert main(["index", str(tmp_path), "--quiet", "--column", "json.width"]) == 0
    assert column_of(tmp_path, "json.width").tolist() == list(range(60))
    path = tmp_path / column_key("json.width", fingerprint_of(tmp_path))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IndexDamaged, match="ends too early"):
        column_of(tmp_path, "json.width")
