"""How does a column come to lie beside an index? ``refill index --column``: of a file of values, or of samples' fields.

Each column is an object of its own, of the version of the dataset that is there. The index stays as it is, so that jobs
that run notice nothing.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from refill.errors import IndexDamaged, InvalidInput
from refill.formats import parser_of
from refill.formats.decoders import decode_member, make_decode
from refill.protocol.column_values import (
    BLOCK_VALUES,
    KEYS,
    LABELS,
    MOST_TEXT_BYTES,
    ColumnValues,
    encode_values,
    is_column_name,
)
from refill_service.cache_core import dataset_columns
from refill_service.cache_core.dataset_index import column_key
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.inspect_dataset import sample_ranges
from refill_service.datasets.progress import Progress
from refill_service.object_store.store_settings import StoreSettings

_MOST_WHOLE = 1 << 63
_DECODE: Any = make_decode(True)
"""As loops decode the members of tars."""
Scalar = int | float | str


@dataclass(frozen=True)
class AskedColumn:
    """A column that ``refill index --column`` is to write."""

    name: str
    file: str | None
    """Of its values by id, ``.npy``; None: they are a field of the samples."""


def asked_column(text: str) -> AskedColumn:
    """Of ``NAME`` or ``NAME=FILE.npy``. Raises :class:`InvalidInput` for anything else."""
    name, has_file, file = text.partition("=")
    if not is_column_name(name) or (has_file and not file.endswith(".npy")):
        raise InvalidInput(
            f"--column {text!r:.100}: write NAME, a field of the samples, or NAME=FILE.npy, an array by id; a name has "
            "up to 64 of the letters A-Z a-z 0-9 _ . -"
        )
    return AskedColumn(name, file if has_file else None)


async def write_columns(
    url: str, asked: Sequence[AskedColumn], settings: StoreSettings | None = None, *, quiet: bool = True
) -> list[tuple[str, str]]:
    """Write these columns of the dataset at ``url``, in place of older ones; ``(name, kind)`` of each, in words.

    Where one is a field, all samples are read once, by one process.

    Raises :class:`InvalidInput` for what is no column, errors of the store and of datasets. Then none was written.
    """
    if len({each.name for each in asked}) != len(asked):
        raise InvalidInput("--column names one column twice")
    dataset = await Dataset.open(url, settings)
    try:
        if dataset.label_summary is not None and any(each.name == LABELS and each.file for each in asked):
            raise InvalidInput(f"--column {LABELS}: this column has the labels of {url} already; name yours otherwise")
        with tempfile.TemporaryDirectory(prefix="refill-column-") as folder:
            columns = {each.name: _Column(each.name, Path(folder)) for each in asked}
            for each in asked:
                if each.file is not None:
                    columns[each.name].add_all(_values_in(each, dataset.num_samples))
            fields = [columns[each.name] for each in asked if each.file is None]
            if fields:
                await _read_fields(dataset, fields, quiet=quiet)
            written = [(name, *column.finish(dataset.index.fingerprint)) for name, column in columns.items()]
            for name, _, path in written:
                await dataset.store.write(column_key(name, dataset.index.fingerprint), path)
            return [(name, kind) for name, kind, _ in written]
    finally:
        await dataset.close()


def _values_in(asked: AskedColumn, num_samples: int) -> Iterator[list[Any]]:
    assert asked.file is not None
    try:
        values = np.load(asked.file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InvalidInput(f"--column {asked.name}: {asked.file} can't be read: {str(error)[:200]}") from error
    if not isinstance(values, np.ndarray) or values.shape != (num_samples,) or values.dtype.kind not in "biufU":
        what = f"{values.dtype} of shape {values.shape}" if isinstance(values, np.ndarray) else "no array"
        raise InvalidInput(
            f"--column {asked.name}: {asked.file} holds {what}, and the dataset has {num_samples:,} samples: give "
            "numbers or text, one for each, by id"
        )
    return (values[first : first + BLOCK_VALUES].tolist() for first in range(0, num_samples, BLOCK_VALUES))


async def _read_fields(dataset: Dataset, columns: Sequence[_Column], *, quiet: bool) -> None:
    parse = parser_of(dataset.index.metadata)

    def take(data: memoryview, records: Any, first: int, end: int) -> None:
        for place in range(end - first):
            start = int(records.offset[place] - records.offset[0])
            sample = data[start : start + int(records.length[place])]
            dataset.verify_sample(sample, records, first + place)
            key, fields = parse(sample, first + place)
            for column in columns:
                column.add(key if column.name == KEYS else _field(fields, column.name, first + place, key))

    with Progress("reading columns", dataset.index.sample_bytes, quiet=quiet) as progress:
        taking: asyncio.Future[None] | None = None
        async for records, first, end in sample_ranges(dataset):
            if isinstance(records, IndexDamaged):
                raise records
            part = records.part(first, end)
            data = await dataset.read_samples(part, first, end)  # while the samples before are parsed
            if taking is not None:
                await taking
            progress.advance(int(part.length.sum()))
            taking = asyncio.get_running_loop().run_in_executor(None, take, data, dataset.as_read(part), first, end)
        if taking is not None:
            await taking


def _field(fields: dict[str, Any], name: str, sample_id: int, key: str) -> Any:
    """A field of a sample, or ``MEMBER.NAME`` of one that holds JSON, as loops see them; None: it has none."""
    member, rest = name, list[str]()
    while member not in fields:
        member, _, last = member.rpartition(".")
        if not member:
            return None
        rest.insert(0, last)
    found = fields[member]
    if type(found) is memoryview:
        found = decode_member(_DECODE, member, bytes(found), sample_id, key)
    for each in rest:
        found = found.get(each) if isinstance(found, dict) else None
    return found


class _Column:
    """Collects the values of a column, by id."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._path = name, folder / name
        self._is_text: bool | None = None
        """None: no sample has had one."""
        self._numbers = array("d")
        self._whole: array[int] | None = array("q")
        """The same numbers; None: one is not whole, missing, or of more than 64 bits."""
        self._rounded: tuple[int, int] | None = None
        """The first sample with a whole number that float64 has not, and that number."""
        self._texts: list[str] = []
        """Those that are not in the spool."""
        self._sizes: list[int] = []
        self._spool: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._count = 0

    def add_all(self, parts: Iterator[list[Any]]) -> None:
        for part in parts:
            for value in part:
                self.add(value)

    def add(self, value: Any) -> None:
        """Of the next sample. Raises :class:`InvalidInput` for one that no column may have."""
        found = self._scalar(value)
        if found is not None and self._is_text is None:
            self._is_text = isinstance(found, str)
            if self._is_text:
                for _ in range(self._count):
                    self._add_text("")
        if self._is_text:
            self._add_text("" if found is None else str(found))
        elif found is None:
            self._numbers.append(math.nan)
            self._whole = None
        else:
            number = self._as_float(found)
            if self._whole is not None and isinstance(found, int) and -_MOST_WHOLE <= found < _MOST_WHOLE:
                self._whole.append(found)
            else:
                self._whole = None
            self._numbers.append(number)
        self._count += 1

    def _as_float(self, found: Scalar) -> float:
        try:
            number = float(found)
        except OverflowError:
            number = math.inf
        if self._rounded is None and isinstance(found, int) and number != found:
            self._rounded = self._count, found
        return number

    def _add_text(self, text: str) -> None:
        self._texts.append(text)
        if len(self._texts) == BLOCK_VALUES:
            self._spooled(self._texts)
            self._texts = []

    def _spooled(self, values: ColumnValues) -> None:
        body = encode_values(values)
        self._sizes.append(self._spool.write(body))

    def _scalar(self, value: Any) -> Scalar | None:
        found = value.item() if isinstance(value, np.generic | np.ndarray) and value.size == 1 else value
        what = ""
        if isinstance(found, bool):
            found = int(found)
        if isinstance(found, str):
            try:
                what = f"a text of more than {MOST_TEXT_BYTES} bytes" * (len(found.encode()) > MOST_TEXT_BYTES)
            except UnicodeEncodeError:
                what = "a text that is no UTF-8"
        elif found is not None and not isinstance(found, int | float):
            what = f"a {type(found).__name__}"
        if not what and found is not None and self._is_text is not None and isinstance(found, str) != self._is_text:
            what = f"{'text' if isinstance(found, str) else 'a number'}, and samples before have the other"
        if what:
            raise InvalidInput(
                f"--column {self.name}: sample {self._count} has {what}; a column is numbers or text of up to "
                f"{MOST_TEXT_BYTES} bytes"
            )
        return found  # type: ignore[no-any-return]

    def finish(self, fingerprint: int) -> tuple[str, Path]:
        """``(kind in words, the file that holds it)``. Raises :class:`InvalidInput` where no sample has a value."""
        if self._is_text is None:
            raise InvalidInput(f"--column {self.name}: no sample has such a field")
        kind = "text"
        if self._is_text:
            if self._texts:
                self._spooled(self._texts)
        else:
            if self._whole is None and self._rounded is not None:
                sample_id, number = self._rounded
                raise InvalidInput(
                    f"--column {self.name}: sample {sample_id} has {number}, which would be rounded: numbers are "
                    "float64 where one is missing, not whole, or 2^63 or more. Write them as text"
                )
            kind = "numbers" if self._whole is None else "whole numbers"
            numbers: Any = (
                np.frombuffer(self._numbers, np.float64)
                if self._whole is None
                else np.frombuffer(self._whole, np.int64)
            )
            for first in range(0, self._count, BLOCK_VALUES):
                self._spooled(numbers[first : first + BLOCK_VALUES])
        self._spool.seek(0)
        with self._path.open("wb") as file:
            sizes = [size + dataset_columns.CHECKSUM_BYTES for size in self._sizes]
            file.write(dataset_columns.encode_head(sizes, self._count, fingerprint))
            for block, size in enumerate(self._sizes):
                file.write(dataset_columns.encode_block(self._spool.read(size), block, fingerprint))
        self._spool.close()
        return kind, self._path
