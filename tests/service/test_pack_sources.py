"""`refill pack` of a list of paths and labels, and of a Hugging Face dataset."""

from __future__ import annotations

import datetime
import io
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.service.packing import everything
from tests.service.test_pack_samples import parsed

import refill
from refill.errors import InvalidInput
from refill_service.cli import main


def photos(folder: Path) -> list[bytes]:
    folder.mkdir()
    made = []
    for number in range(12):
        out = io.BytesIO()
        pixels = np.random.default_rng(number).integers(0, 255, (6, 5, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(out, format="JPEG")
        made.append(out.getvalue())
        (folder / f"{number}.jpg").write_bytes(made[-1])
    return made


def samples_at(out: Path) -> list[dict[str, bytes]]:
    return [members for _, members in sorted(parsed(everything(out.as_uri())[3]))]


def list_of(tmp_path: Path, form: str, labels: list[Any]) -> Path:
    path = tmp_path / f"list.{form}"
    rows = [{"path": f"photos/{n}.jpg", "label": label, "artist": f"a{n}"} for n, label in enumerate(labels)]
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    else:
        separator = "\t" if form == "tsv" else ","
        lines = [separator.join(rows[0]), *(separator.join(map(str, row.values())) for row in rows)]
        path.write_text("\ufeff" + "\n".join(lines))
    return path


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl"])
@pytest.mark.parametrize("labels", [["cat", "ant", "dog"] * 4, list(range(12))], ids=["names", "numbers"])
def test_a_list_of_paths_and_labels(tmp_path: Path, form: str, labels: list[Any], capsys: Any) -> None:
    made = photos(tmp_path / "photos")
    path, out = list_of(tmp_path, form, labels), tmp_path / "out"
    assert main(["pack", str(path), str(out)]) == 0
    said = capsys.readouterr()
    assert "12 files in column 'path', labels in column 'label'" in said.err
    assert "packed 12 samples" in said.out
    assert "alone would read the source at" in said.out
    names = sorted(set(labels)) if isinstance(labels[0], str) else None
    assert everything(out.as_uri())[1]["classes"] == names
    for number, found in enumerate(samples_at(out)):
        label = labels[number] if names is None else names.index(labels[number])
        assert found == {
            "jpg": made[number],
            "cls": str(label).encode(),
            "json": json.dumps({"artist": f"a{number}"}).encode(),
        }


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_numbers_stay_numbers_however_they_are_written(tmp_path: Path, form: str, capsys: Any) -> None:
    """pandas writes whole numbers as 3.0 where others are missing. As names they would be sorted by their letters."""
    photos(tmp_path / "photos")
    labels = ["1.0", "2.0", "10.0", "3.0", " 4", "1e1"] if form == "csv" else [1.0, 2.0, 10.0, 3.0, "4", 10]
    out = tmp_path / "out"
    assert main(["pack", str(list_of(tmp_path, form, [*labels, ""])), str(out)]) == 0
    said = capsys.readouterr().err
    assert "labels in column 'label', numbers" in said
    assert "warning: 1 of 7 samples have no label" in said
    assert [found.get("cls") for found in samples_at(out)] == [b"1", b"2", b"10", b"3", b"4", b"10", None]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_number_that_is_missing_is_no_name(tmp_path: Path, form: str) -> None:
    photos(tmp_path / "photos")
    labels = [*range(11), float("nan")]
    out = tmp_path / "out"
    assert main(["pack", str(list_of(tmp_path, form, labels)), str(out), "--quiet"]) == 0
    assert [found.get("cls") for found in samples_at(out)] == [*(b"%d" % number for number in range(11)), None]


def test_digits_and_letters_may_be_classes_together(tmp_path: Path) -> None:
    photos(tmp_path / "photos")
    assert main(["pack", str(list_of(tmp_path, "csv", ["b", "0", "a", "1"])), str(tmp_path / "out"), "--quiet"]) == 0
    assert [found["cls"] for found in samples_at(tmp_path / "out")] == [b"3", b"0", b"2", b"1"]


def test_a_column_may_be_missing_in_the_first_line(tmp_path: Path) -> None:
    photos(tmp_path / "photos")
    path, out = tmp_path / "list.jsonl", tmp_path / "out"
    rows = [
        {"path": "photos/0.jpg"},
        {"path": "photos/1.jpg", "label": "dog"},
        {"path": "photos/2.jpg", "label": "cat"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["pack", str(path), str(out), "--quiet"]) == 0
    assert [found.get("cls") for found in samples_at(out)] == [None, b"1", b"0"]


def test_what_is_wrong_with_a_list_is_one_line(tmp_path: Path, capsys: Any) -> None:
    photos(tmp_path / "photos")
    path = tmp_path / "list.csv"

    def refused(text: str, said: str, *more: str, name: str = "list.csv") -> None:
        (tmp_path / name).write_text(text)
        assert main(["pack", str(tmp_path / name), str(tmp_path / "out"), *more]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert said in error, error
        assert not list((tmp_path / "out").glob("*.index")) if (tmp_path / "out").exists() else True

    refused("", "has no rows")
    refused("a,b\n1,2\n", "has columns 'a', 'b', and none is called so: --path-column says which")
    refused("path,file\n1,2\n", "both 'path' and 'file' may be it")
    refused("path,x\n1\n", "line 2: it has not as many columns")
    refused("path\ns3://b/x.jpg\n", "line 2: 's3://b/x.jpg' is no file of this machine")
    refused("path\nnone.jpg\n", "item 0: can't read")
    for label in ("-1", "0.5", "1048576"):
        refused(f"path,label\nphotos/0.jpg,{label}\nphotos/1.jpg,2\n", f"label {label} in column 'label' is a number")
    refused(
        "path,label\nphotos/0.jpg,10\nphotos/1.jpg,2\nphotos/2.jpg,cat\n",
        "labels in column 'label' are numbers and names, such as 10 and 'cat', and as names they would be numbered "
        "anew (10 as 0)",
    )
    refused("path,x,x\nphotos/0.jpg,1,2\n", "has two columns 'x'")
    refused('{"path": "photos/0.jpg", "label": ["a"]}\n', "line 1: label ['a'] in column", name="list.jsonl")
    (tmp_path / "0.json").write_text("{}")
    (tmp_path / "0.cls").write_text("7")
    refused("path,x\n0.json,1\n", "0.json: member json is the list's other columns")
    refused("path,label\n0.cls,1\n", "0.cls: member cls is the label, and this file would be member cls, too")
    refused("path\nphotos/0.jpg\n", "has no column 'z'", "--label-column", "z")
    refused("path\nphotos/0.jpg\n", "--classes", "--classes", "no")
    refused("path\nphotos/0.jpg\n", "--split is for", "--split", "train")
    refused("{nonsense\n", "line 1: it is no JSON", name="list.jsonl")
    refused("[1]\n", "line 1: it is no JSON object", name="list.jsonl")
    path.write_bytes(b"path\n\xff\xfe\n")
    assert main(["pack", str(path), str(tmp_path / "out")]) == 2
    assert "is not UTF-8" in capsys.readouterr().err
    assert main(["pack", str(tmp_path / "photos"), str(tmp_path / "out"), "--split", "x"]) == 2
    assert "is no list and no Hugging Face dataset" in capsys.readouterr().err


def hugging_face(folder: Path) -> tuple[Any, list[bytes]]:
    datasets = pytest.importorskip("datasets")
    made = photos(folder)
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog", "emu"]),
            "caption": datasets.Value("string"),
            "ids": datasets.List(datasets.Value("int32")),
            "score": datasets.Value("float64"),
        }
    )
    rows = {
        "image": [{"bytes": data, "path": None} for data in made],
        "label": [number % 3 - (number == 11) * 3 for number in range(12)],
        "caption": [f"photo {number}" for number in range(12)],
        "ids": [list(range(number)) for number in range(12)],
        "score": [number / 4 for number in range(12)],
    }
    return datasets.Dataset.from_dict(rows, features=features), made


@pytest.mark.variants("saved")
@pytest.mark.parametrize("form", ["python", "iterable", "saved", "parquet"])
def test_a_hugging_face_dataset(tmp_path: Path, form: str, capsys: Any) -> None:
    dataset, made = hugging_face(tmp_path / "photos")
    out = tmp_path / "out"
    if form in ("python", "iterable"):
        given = dataset if form == "python" else dataset.to_iterable_dataset()
        refill.pack(given, out.as_uri(), quiet=True)
    elif form == "saved":
        dataset.save_to_disk(tmp_path / "saved")
        assert main(["pack", str(tmp_path / "saved"), str(out), "--jobs", "2", "--blob-size", "5kB"]) == 0
        assert "image (member image.jpg)" in capsys.readouterr().err
    else:
        (tmp_path / "files").mkdir()
        dataset.to_parquet(tmp_path / "files" / "train.parquet")
        assert main(["pack", f"hf:{tmp_path / 'files'}", str(out), "--split", "train"]) == 0
    assert everything(out.as_uri())[1]["classes"] == ["cat", "dog", "emu"]
    for number, found in enumerate(samples_at(out)):
        assert found.pop("image.jpg") == made[number], "a picture was encoded anew"
        assert found.pop("cls", None) == (None if number == 11 else str(number % 3).encode())
        ids = np.load(io.BytesIO(found.pop("ids.npy")))
        assert (ids.dtype, ids.tolist()) == (np.int32, list(range(number)))
        assert json.loads(found.pop("json")) == {"caption": f"photo {number}", "score": number / 4}
        assert not found


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([b"x"], "column 'x' holds a bytes in a list or dict, which JSON can't say"),
        ([{"bytes": b"x", "path": None}], "column 'x' holds a bytes in a list or dict"),
        ({"a": float("nan")}, "column 'x' holds NaN, or an infinite number"),
        (float("inf"), "column 'x' holds NaN, or an infinite number"),
    ],
)
def test_what_json_cant_say_names_its_column(tmp_path: Path, value: Any, said: str) -> None:
    datasets = pytest.importorskip("datasets")
    given = datasets.Dataset.from_dict({"a": [1, 2], "x": [value, value]})
    with pytest.raises(InvalidInput, match=re.escape(said)):
        refill.pack(given, (tmp_path / "out").as_uri(), quiet=True, jobs=1)


def test_values_that_are_plainly_text_are_said_in_json(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    row = {"day": datetime.date(2026, 1, 31), "price": Decimal("1.50"), "lasts": datetime.timedelta(seconds=90)}
    refill.pack(datasets.Dataset.from_list([row]), (tmp_path / "out").as_uri(), quiet=True, jobs=1)
    (found,) = samples_at(tmp_path / "out")
    assert json.loads(found["json"]) == {"day": "2026-01-31", "price": "1.50", "lasts": "0:01:30"}


def test_a_column_whose_first_picture_is_missing_has_its_name(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = photos(tmp_path / "photos")[:2]
    rows = {"photo": [None, *({"bytes": data, "path": None} for data in made)], "n": [0, 1, 2]}
    features = datasets.Features({"photo": datasets.Image(), "n": datasets.Value("int64")})
    refill.pack(datasets.Dataset.from_dict(rows, features=features), (tmp_path / "out").as_uri(), quiet=True, jobs=1)
    assert [found.get("photo.jpg") for found in samples_at(tmp_path / "out")] == [None, *made]


def test_a_split_has_to_be_named(tmp_path: Path, capsys: Any) -> None:
    datasets = pytest.importorskip("datasets")
    dataset, _ = hugging_face(tmp_path / "photos")
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "saved")
    assert main(["pack", str(tmp_path / "saved"), str(tmp_path / "out")]) == 2
    assert "has splits train, test: --split says which" in capsys.readouterr().err
    assert main(["pack", f"hf:{tmp_path}/nothing", str(tmp_path / "out")]) == 2
    assert "can't load" in capsys.readouterr().err
