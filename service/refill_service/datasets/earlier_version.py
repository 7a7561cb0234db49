"""What does `refill index --append` do with the index that is there? Its samples stay where they are, with their ids.

A dataset's version is its fingerprint. The earlier index and its labels are kept under names of their own
(:func:`kept_key`) before others take their place, so jobs that have begun with it find it whenever they look.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from refill.errors import DatasetReplaced, InvalidInput
from refill_service.cache_core.dataset_index import INDEX_KEY, RECORD, kept_key
from refill_service.datasets.dataset_reader import Dataset, read_index
from refill_service.datasets.index_writer import IndexWriter
from refill_service.datasets.row_groups import file_of
from refill_service.formats.table import TABLES
from refill_service.object_store.base import ObjectStore
from refill_service.object_store.store_settings import StoreSettings
from refill_service.object_store.store_url import parse_url

if TYPE_CHECKING:
    from refill_service.formats.interface import Format, Listing, Plan, Shard

_SAMPLES_AT_ONCE = 1 << 20
_COPIED_BYTES = 16 << 20


class _Counts(Protocol):
    """What is counted of a dataset, by whatever counts it."""

    num_samples: int
    num_blobs: int
    blob_bytes: int


_OPTIONS = {
    "read": "--columns",
    "windows": "--windows",
    "episodes": "--episodes",
    "tokens": "--tokens",
    "stride": "--stride",
    "dtype": "--dtype",
}
"""What an index says of its format, and the option that says it."""


def _other_options(said: dict[str, Any], planned: dict[str, Any]) -> str:
    """Those of the earlier version that are others now, as they were written: ``with --tokens 4``; empty: none."""
    differ = [name for name in _OPTIONS if said.get(name) != planned.get(name)]
    having = " ".join(f"{_OPTIONS[name]} {_written(said[name])}" for name in differ if name in said)
    without = " or ".join(_OPTIONS[name] for name in differ if name not in said)
    return " and ".join(each for each in (having and f"with {having}", without and f"without {without}") if each)


def _written(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


class EarlierVersion:
    """The version of a dataset that is appended to, and what the next one takes over from it. Close it when done."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        index = dataset.index
        self._format: dict[str, Any] = dict(index.metadata.get("format") or {"name": "webdataset"})
        self.format_name: str = self._format["name"]
        self.checksums = "all" if index.header.has_checksums else "first-read"
        about = ("labels", "data", "format")
        self.metadata = {name: value for name, value in index.metadata.items() if name not in about}

    @classmethod
    async def open(cls, url: str, settings: StoreSettings | None) -> EarlierVersion:
        """Raises as :meth:`Dataset.open` does."""
        return cls(await Dataset.open(url, settings))

    def data_of(self, url: str, output: str | None) -> tuple[str, str | None]:
        """``(where the data lies, where the index lies if elsewhere)``, of what was given: the index knows its data, so
        its own URL is enough. Raises :class:`InvalidInput` where it is the index of other data."""
        data_url = self._dataset.index.data_url
        if data_url is None:
            return url, output
        if output is not None and str(parse_url(url)) != data_url:
            raise InvalidInput(f"the index at {output} is of {data_url}, and not of {url}")
        return data_url, self._dataset.url

    @property
    def blobs(self) -> list[tuple[str, int]]:
        """``(name, bytes)`` of each."""
        blobs = self._dataset.blobs
        return list(zip(blobs.names, blobs.size_bytes.tolist(), strict=True))

    async def close(self) -> None:
        await self._dataset.close()

    def counted_in(self, summary: _Counts) -> None:
        """As of a dataset to which nothing is added."""
        index = self._dataset.index
        summary.num_samples, summary.num_blobs = index.num_samples, len(index.blobs)
        summary.blob_bytes = int(index.blobs.size_bytes.sum())

    def new_among(self, format_: Format, plan: Plan, listing: Listing, checksums: str) -> list[Shard]:
        """What is planned and not in this version. Raises :class:`InvalidInput` where samples would not stay what they
        are: a file is gone or another one, or samples would be read otherwise."""
        blobs, url = self._dataset.blobs, self._dataset.url
        way_out = "make another index (--force): then ids change, and jobs begin anew"
        said, planned = self._format, {"name": format_.NAME} | plan.about
        if said["name"] != planned["name"]:
            raise InvalidInput(f"{url} was indexed with --format {said['name']}: give that again, or {way_out}")
        if options := _other_options(said, planned):
            raise InvalidInput(f"{url} was indexed {options}: do so again, or {way_out}")
        if checksums != self.checksums:
            raise InvalidInput(f"{url} was indexed with --checksums {self.checksums}: give that again, or {way_out}")
        if differs := sorted(name for name in said | planned if said.get(name) != planned.get(name)):
            had, has = (", ".join(f"{name} {each.get(name)}" for name in differs) for each in (said, planned))
            raise InvalidInput(f"what lies there has {has:.300}, and {url} was indexed with {had:.300}; {way_out}")
        classes, now = self.metadata.get("classes") or [], plan.metadata.get("classes") or []
        if plan.metadata and now[: len(classes)] != classes:
            raise InvalidInput(f"the folders are other classes now, which would number those of {url} anew; {way_out}")
        is_table = self.format_name in TABLES  # then a blob is a group, and as large as its rows
        known: set[str] = set()
        for blob, (name, size_bytes) in enumerate(zip(blobs.names, blobs.size_bytes.tolist(), strict=True)):
            key = (file_of(name) or name) if is_table else name  # a file without samples has no groups
            known.add(key)
            found = listing.get(key)
            if found is None:
                raise InvalidInput(f"{key}, which the index at {url} has, is gone; {way_out}")
            etag = blobs.etag_of(blob)
            is_other = self._file_bytes(name, size_bytes) not in (None, found.size_bytes)
            if is_other or (etag and found.etag and not self._dataset.is_same(etag, found.etag)):
                raise InvalidInput(f"{key} is another file than the one that the index at {url} has; {way_out}")
        return [shard for shard in plan.shards if shard.key not in known]

    def _file_bytes(self, name: str, size_bytes: int) -> int | None:
        """What the file of a blob had when it was indexed. None: that is not known."""
        key, _, place = name.rpartition("#")
        if self.format_name not in TABLES or not key:
            return size_bytes
        numbers = place.partition(";")[0].split(",")  # of Parquet: which group, where the footer begins, where it ends
        return int(numbers[2]) if self.format_name != "arrow" and len(numbers) == 3 else None

    async def write_to(self, writer: IndexWriter) -> None:
        """All of its blobs, samples and labels, in their order."""
        dataset, blobs = self._dataset, self._dataset.blobs
        has_labels = dataset.label_summary is not None
        for first, end in self._runs():
            low, high = int(blobs.first_sample[first]), int(blobs.first_sample[end])
            records = await dataset.load_records(low, high)
            labels = await dataset.labels(low, high) if has_labels and high > low else None
            for blob in range(first, end):
                here = slice(int(blobs.first_sample[blob]) - low, int(blobs.first_sample[blob + 1]) - low)
                found = np.zeros(here.stop - here.start, dtype=RECORD)
                found["offset"], found["length"] = records.offset[here], records.length[here]
                if records.has_checksums:
                    found["checksum"] = records.checksum[here]
                writer.add_blob(
                    blobs.names[blob],
                    int(blobs.size_bytes[blob]),
                    [found],
                    None if labels is None else labels[here],
                    blobs.etag_of(blob),
                )

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Blobs ``[first, end)`` that are taken over together: one, or so many that all have a million samples."""
        starts = self._dataset.blobs.first_sample
        first = 0
        while first < len(starts) - 1:
            end = int(np.searchsorted(starts, starts[first] + _SAMPLES_AT_ONCE, side="right")) - 1
            yield first, (end := min(max(end, first + 1), len(starts) - 1))
            first = end

    async def keep(self, store: ObjectStore, folder: Path) -> None:
        """Copy it to where jobs that have begun with it look. Raises :class:`DatasetReplaced` when it is no longer the
        one that was read: somebody else appends, too."""
        header = self._dataset.index.header
        if (await read_index(store)).fingerprint != header.fingerprint:
            raise DatasetReplaced(f"the index at {store.url} was replaced meanwhile; start again", dataset=store.url)
        copy = folder / "copy"
        with copy.open("wb") as file:
            for start in range(0, header.index_bytes, _COPIED_BYTES):
                end = min(header.index_bytes, start + _COPIED_BYTES)
                file.write(await store.read_range(INDEX_KEY, start, end))
        await store.write(kept_key(INDEX_KEY, header.fingerprint), copy)
