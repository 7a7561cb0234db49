"""What is packed that is no folder of files? Lists of paths and labels, and Hugging Face datasets.

Each becomes items and a function that makes a sample of one, in the process that packs it.
"""

from __future__ import annotations

import csv
import datetime
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import xxhash

from refill.errors import EmptyDataset, InvalidInput
from refill_service.cache_core.dataset_labels import MOST_LABELS

_SEPARATORS = (".csv", ".tsv")
LISTS = (*_SEPARATORS, ".jsonl", ".ndjson")
_PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path")
_LABELS = ("label", "cls", "class", "target")
_MOST_CLASSES = 100_000
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_MISSING = "nan"
"""As pandas and numpy write a number that is missing."""
_HF = "hf:"
_MEDIA = ("Image", "Audio", "Video", "Pdf")
_MAGIC = ((b"\xff\xd8\xff", "jpg"), (b"\x89PNG", "png"), (b"RIFF", "webp"), (b"GIF8", "gif"), (b"BM", "bmp"))


@dataclass(frozen=True)
class Items:
    """What :func:`pack_samples` is given."""

    samples: Iterable[Any]
    function: Callable[[Any], Any]
    classes: list[str] | None
    about: str
    """So that a pack goes on with no other's parts."""
    said: str
    """What was decided."""


def items_of(source: str, *, path_column: str | None, label_column: str | None, split: str | None) -> Items | None:
    """None: it is none of these, but a folder of files. Raises :class:`InvalidInput` for what can't be read."""
    if source.startswith(_HF) or _is_saved(source):
        if path_column or label_column:
            raise InvalidInput("--path-column and --label-column are for lists of paths")
        return items_of_hugging_face(_loaded(source, split))
    if not (os.path.isfile(source) and source.lower().endswith(LISTS)):
        return None
    if split:
        raise InvalidInput("--split is for Hugging Face datasets")
    return _items_of_list(source, path_column, label_column)


# Lists of paths and labels.


def _items_of_list(source: str, path_column: str | None, label_column: str | None) -> Items:
    rows = _rows_of(source)
    first = next(rows, None)
    if first is None:
        raise EmptyDataset(f"{source} has no rows")
    names = list(first[1]) if source.lower().endswith(_SEPARATORS) else _names_in(source)
    path_column = _column(source, names, path_column, _PATHS, "--path-column")
    label_column = _column(source, names, label_column, _LABELS, "--label-column", may_be_none=True)
    items: list[tuple[str, Any, str]] = []
    hasher = xxhash.xxh3_64()
    for at, row in _with(first, rows):
        path, label = row.pop(path_column, None), row.pop(label_column, None) if label_column else None
        if not isinstance(path, str) or not path:
            raise InvalidInput(f"{source}, line {at}: no path in column {path_column!r}")
        if "://" in path:
            raise InvalidInput(f"{source}, line {at}: {path!r:.80} is no file of this machine")
        label = label.strip() if isinstance(label, str) else label
        if isinstance(label, (list, dict)):
            raise InvalidInput(
                f"{source}, line {at}: label {label!r:.60} in column {label_column!r} is no number and no text. Of a "
                f"column that is not called {', '.join(_LABELS)}, member json holds such values"
            )
        label = None if label in (None, "") or label != label else label  # NaN is no label
        items.append((path, label, json.dumps(row) if row else ""))
        hasher.update(repr(items[-1]).encode())
    classes, numbers = _classes(source, label_column, [label for _, label, _ in items])
    function = _FileRow(os.path.dirname(os.path.abspath(source)), numbers)
    said = f"{source}: {len(items):,} files in column {path_column!r}"
    if label_column:
        named = f", {len(classes):,} classes" if classes else ", numbers"
        said += f", labels in column {label_column!r}{named}"
    if others := [name for name in names if name not in (path_column, label_column)]:
        said += f"; member json holds {', '.join(map(repr, others[:3]))}{', ...' if len(others) > 3 else ''}"
    return Items(items, function, classes, hasher.hexdigest(), said)


def _with(
    first: tuple[int, dict[str, Any]], rows: Iterator[tuple[int, dict[str, Any]]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    yield first
    yield from rows


def _names_in(source: str) -> list[str]:
    """Of JSON lines, the columns that any has: each may leave out what it has no value of."""
    return list(dict.fromkeys(name for _, row in _rows_of(source) for name in row))


def _rows_of(source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines, counted from 1, with a value for each column."""
    try:
        with open(source, encoding="utf-8-sig", newline="") as file:
            if source.lower().endswith(_SEPARATORS):
                reader = csv.DictReader(file, delimiter="\t" if source.lower().endswith(".tsv") else ",", strict=True)
                if twice := [name for name, count in Counter(reader.fieldnames or ()).items() if count > 1]:
                    raise InvalidInput(f"{source} has two columns {twice[0]!r:.60}: give each a name of its own")
                for row in reader:
                    if None in row or None in row.values():
                        raise InvalidInput(f"{source}, line {reader.line_num}: it has not as many columns as line 1")
                    yield reader.line_num, row
                return
            for at, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    found = json.loads(line)
                except ValueError as error:
                    raise InvalidInput(f"{source}, line {at}: it is no JSON: {str(error)[:100]}") from error
                if not isinstance(found, dict):
                    raise InvalidInput(f"{source}, line {at}: it is no JSON object")
                yield at, found
    except OSError as error:
        raise InvalidInput(f"can't read {source}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{source} is not UTF-8, at byte {error.start}") from error
    except csv.Error as error:
        raise InvalidInput(f"{source} is no CSV: {error}") from error


def _column(
    source: str, names: list[str], given: str | None, known: tuple[str, ...], option: str, *, may_be_none: bool = False
) -> str:
    there = ", ".join(map(repr, names[:20]))
    if given is not None:
        if given not in names:
            raise InvalidInput(f"{source} has no column {given!r}; it has {there}")
        return given
    found = [name for name in names if name.strip().lower() in known]
    if len(found) == 1:
        return found[0]
    if not found and may_be_none:
        return ""
    why = f"both {found[0]!r} and {found[1]!r} may be it" if found else "none is called so"
    raise InvalidInput(f"{source} has columns {there}, and {why}: {option} says which ({', '.join(known)} are known)")


def _classes(source: str, column: str, labels: list[Any]) -> tuple[list[str] | None, dict[str, int] | None]:
    """Names and their numbers; None where labels are numbers, or there are none. Raises :class:`InvalidInput` for
    numbers that are none of classes: as names they would be sorted by their letters."""
    texts = {label if isinstance(label, str) else repr(label) for label in labels if label is not None}
    numeric = {text for text in texts if _NUMBER.fullmatch(text)}
    if all(text in numeric or text.lower() == _MISSING for text in texts):
        if (other := next((text for text in sorted(numeric) if _class_number(text) is None), None)) is not None:
            raise InvalidInput(
                f"{source}: label {other} in column {column!r} is a number, and none of a class (0 to "
                f"{MOST_LABELS - 1:,}): leave it empty where there is no class; of a column "
                f"that is not called {', '.join(_LABELS)}, member json holds the numbers"
            )
        return None, None
    if len(texts) > _MOST_CLASSES:
        raise InvalidInput(f"{source} has {len(texts):,} different labels, and there may be {_MOST_CLASSES:,}")
    names = sorted(texts)
    numbers = {name: number for number, name in enumerate(names)}
    if other := next((text for text in sorted(numeric) if _class_number(text) != numbers[text]), ""):
        raise InvalidInput(
            f"{source}: labels in column {column!r} are numbers and names, such as {other} and "
            f"{min(texts - numeric)!r:.60}, and as names they would be numbered anew ({other} as {numbers[other]}): "
            "write numbers alone, or names alone"
        )
    return names, numbers


def _class_number(text: str) -> int | None:
    """As pandas writes it, too: 3.0 where others of the column are missing."""
    number = float(text)
    return int(number) if number.is_integer() and 0 <= number < MOST_LABELS else None


class _FileRow:
    """A row, as a sample: what the file holds, under its extension."""

    def __init__(self, folder: str, numbers: Mapping[str, int] | None) -> None:
        self._folder, self._numbers = folder, numbers

    def __call__(self, item: tuple[str, Any, str]) -> dict[str, Any]:
        path, label, more = item
        try:
            with open(os.path.join(self._folder, path), "rb", buffering=0) as file:
                content = file.readall()
        except OSError as error:
            raise InvalidInput(f"can't read {os.path.join(self._folder, path)}: {error.strerror}") from error
        name = os.path.basename(path).rpartition(".")[2].lower() if "." in os.path.basename(path) else "bin"
        made: dict[str, Any] = {}
        if label is not None:
            text = label if isinstance(label, str) else repr(label)
            made["cls"] = _class_number(text) if self._numbers is None else self._numbers[text]
        if more:
            made["json"] = json.loads(more)
        if name in made:
            of = "the label" if name == "cls" else "the list's other columns"
            raise InvalidInput(
                f"{path}: member {name} is {of}, and this file would be member {name}, too: leave these columns out of "
                "the list, or rename the files"
            )
        return {name: content} | made


# Hugging Face datasets.


def is_hugging_face(samples: Any) -> bool:
    return type(samples).__module__.partition(".")[0] == "datasets" and hasattr(samples, "features")


def _is_saved(source: str) -> bool:
    """By ``save_to_disk``."""
    return os.path.isfile(os.path.join(source, "dataset_dict.json")) or (
        os.path.isfile(os.path.join(source, "dataset_info.json")) and os.path.isfile(os.path.join(source, "state.json"))
    )


def _loaded(source: str, split: str | None) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise InvalidInput(f"{source} needs Hugging Face datasets: pip install datasets") from error
    name = source.removeprefix(_HF)
    if not name:
        raise InvalidInput(f"{source} names no dataset: write {_HF}NAME as on the Hub, or {_HF}FOLDER")
    try:
        found = datasets.load_from_disk(name) if _is_saved(name) else datasets.load_dataset(name)
    except Exception as error:
        raise InvalidInput(
            f"can't load {name} with Hugging Face datasets: {' '.join(str(error).split())[:300]}"
        ) from error
    if not isinstance(found, dict):
        return found
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split not in found:
        raise InvalidInput(f"{name} has splits {', '.join(found)}: --split says which is packed")
    return found[split]


def items_of_hugging_face(dataset: Any) -> Items:
    """Of a ``datasets.Dataset``, whose rows are read where they are packed, or an ``IterableDataset``. Media stay the
    bytes that they are, the first column of classes is ``cls``, and what else JSON can say is in the member ``json``.
    """
    import datasets

    features = dataset.features
    if features is None:
        raise InvalidInput("this IterableDataset does not say what its columns are: call its .cast(features) first")
    dataset = dataset.with_format(None)
    media = [name for name, feature in features.items() if type(feature).__name__ in _MEDIA]
    for name in media:
        dataset = dataset.cast_column(name, type(features[name])(decode=False))
    label = next((name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)), None)
    classes = None if label is None else list(features[label].names)
    first = next(iter(dataset), None)
    if first is None:
        raise EmptyDataset("the dataset has no rows")
    names = {name: _media_name(name, first[name] or _first_of(dataset, name)) for name in media}
    arrays = {name: dtype for name, feature in features.items() if (dtype := _dtype_of(feature)) is not None}
    row = _HuggingFaceRow(names, arrays, label)
    told = [f"{name} (member {names[name]})" for name in media] + [f"{name} (member {name}.npy)" for name in arrays]
    told += [f"{label} (member cls, {len(classes or ()):,} classes)"] * (label is not None)
    rest = [name for name in features if name not in (*media, *arrays, label)]
    told += [f"{', '.join(rest)} (member json)"] * bool(rest)
    count = f"{len(dataset):,} rows" if hasattr(dataset, "__len__") else "rows"
    about = f"{getattr(dataset, '_fingerprint', '')}"
    said = f"Hugging Face dataset of {count}: {'; '.join(told)}"
    if hasattr(dataset, "__len__"):
        return Items(range(len(dataset)), _RowAt(dataset, row), classes, about, said)
    return Items(dataset, row, classes, about, said)


def _first_of(dataset: Any, column: str) -> Any:
    """The first value that there is in a column; None: there is none."""
    return next((row[column] for row in dataset.select_columns([column]) if row[column] is not None), None)


def _media_name(column: str, value: Any) -> str:
    """The member's name, for all rows, whatever the others are: decoders look at the bytes."""
    content, path = (value or {}).get("bytes") or b"", (value or {}).get("path") or ""
    kind = next((kind for magic, kind in _MAGIC if content.startswith(magic)), None)
    if content[8:12] == b"WAVE":
        kind = "wav"
    kind = kind or (os.path.basename(path).rpartition(".")[2].lower() if "." in os.path.basename(path) else "bin")
    return column if column == kind else f"{column}.{kind}"


def _dtype_of(feature: Any) -> str | None:
    """Of a column of lists of numbers, or of arrays."""
    inner = getattr(feature, "feature", None)
    dtype = getattr(inner, "dtype", None) if inner is not None else None
    if type(feature).__name__.startswith("Array"):
        dtype = feature.dtype
    try:
        kind = np.dtype(dtype).kind if isinstance(dtype, str) else ""
    except TypeError:
        return None
    return dtype if kind in ("i", "u", "f", "b") else None


class _HuggingFaceRow:
    """A row, as a sample."""

    def __init__(self, media: dict[str, str], arrays: dict[str, str], label: str | None) -> None:
        self._media, self._arrays, self._label = media, arrays, label

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for name, value in row.items():
            if value is None:
                continue
            if name in self._media:
                found[self._media[name]] = _content(value)
            elif name in self._arrays:
                found[name] = np.asarray(value, dtype=self._arrays[name])
            elif name == self._label:
                if value >= 0:  # -1: it has none
                    found["cls"] = value
            elif isinstance(value, bytes):
                found[f"{name}.bin"] = value
            else:
                rest[name] = _plain(name, value)
        return found | ({"json": rest} if rest else {})


class _RowAt:
    """A row, as a sample, by its number."""

    def __init__(self, dataset: Any, row: _HuggingFaceRow) -> None:
        self._dataset, self._row = dataset, row

    def __call__(self, number: int) -> dict[str, Any]:
        return self._row(self._dataset[number])


def _content(value: Mapping[str, Any]) -> bytes:
    content = value.get("bytes")
    if content is not None:
        return bytes(content)
    path = value.get("path")
    try:
        with open(str(path), "rb") as file:
            return file.read()
    except OSError as error:
        raise InvalidInput(f"can't read {path}: {error.strerror}") from error


def _plain(column: str, value: Any) -> Any:
    """As JSON has it. Raises :class:`InvalidInput` for what it can't say."""
    try:
        return json.loads(json.dumps(value, default=_as_json, allow_nan=False))
    except (TypeError, ValueError) as error:
        why = "NaN, or an infinite number" if isinstance(error, ValueError) else str(error)
        raise InvalidInput(
            f"column {column!r:.60} holds {why}, which JSON can't say: change it by the dataset's map, as a picture or "
            "bytes into a column of its own and NaN into None, or remove the column"
        ) from error


def _as_json(value: Any) -> str:
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (Decimal, datetime.timedelta, UUID)):
        return str(value)
    raise TypeError(f"a {type(value).__name__} in a list or dict")
