"""What scanners and parsers of formats read, from memory: for tests of damage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np

from refill.errors import SampleDamaged
from refill.formats import parser_of
from refill_service.cache_core.dataset_index import RecordArray
from refill_service.formats.interface import Listing, Options, Plan, Shard, ShardBytes, ShardReport
from refill_service.formats.rows import RowFormat
from refill_service.formats.table import FORMATS, TABLES, planned
from refill_service.object_store.base import ListedVersion

__all__ = ["MemoryShard", "parsed_in_memory"]


class MemoryShard:
    """:param most_bytes: that may be asked for at once; more is an error of the scanner's."""

    def __init__(self, objects: Mapping[str, bytes], key: str, most_bytes: int = 16 << 20) -> None:
        self.source = key
        self._objects, self._most_bytes = objects, most_bytes

    def read(self, start: int, end: int) -> memoryview:
        data = self._objects[self.source]
        assert 0 <= start <= end <= len(data), f"bytes {start}-{end} of {len(data)} were asked for"
        assert end - start <= self._most_bytes
        return memoryview(data)[start:end]

    def damaged(self, why: str, at: int) -> SampleDamaged:
        return SampleDamaged(f"{self.source}: {why}, at {at}", blob=self.source, sample=None, start=at, end=at)

    def other(self, found: ListedVersion) -> ShardBytes:
        return MemoryShard(self._objects, found.key)


class _MemorySource:
    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self._objects = objects

    async def read(self, found: ListedVersion, start: int, end: int) -> memoryview:
        return memoryview(self._objects[found.key])[start:end]


def parsed_in_memory(objects: Mapping[str, bytes], options: Options, name: str | None = None) -> int:
    """Index these objects, check that samples lie where they may, and parse each of them; errors of single samples are
    passed over. Returns how many there are."""
    listing = Listing("x", [ListedVersion(key, len(objects[key]), "e") for key in sorted(objects)])
    format_, plan = asyncio.run(planned(listing, _MemorySource(objects), options, name))
    about = {"format": {"name": format_.NAME} | plan.about} if plan.about else {}
    parse, count = parser_of(about), 0
    for shard in plan.shards:
        if format_.NAME in TABLES:
            count += _decoded(TABLES[format_.NAME], shard, objects, plan, parse)
            continue
        before = earlier = 0
        for records in format_.scan(shard, MemoryShard(objects, shard.key), ShardReport()):
            count += _checked(records, shard.size_bytes)
            for offset, length in zip(records["offset"].tolist(), records["length"].tolist(), strict=True):
                assert offset >= (earlier if plan.overlaps else before)
                before, earlier = offset + length, before
                try:
                    parse(memoryview(objects[shard.key])[offset : offset + length], 0)
                except SampleDamaged:
                    continue
    return count


def _decoded(
    format_: RowFormat, shard: Shard, objects: Mapping[str, bytes], plan: Plan, parse: Callable[[memoryview, int], Any]
) -> int:
    """The rows of a table, found once as an index does it and once as a pod does. Where the index is of headers alone,
    these say no more than how many there are, and what they take at most."""
    report = ShardReport()
    file = MemoryShard(objects, shard.key)
    records = list(FORMATS[format_.NAME].scan(shard, file, report))
    lengths = [int(length) for batch in records for length in batch["length"]]

    async def read(start: int, end: int, key: str | None = None, /) -> memoryview:
        return (file if key is None else MemoryShard(objects, key)).read(start, end)

    found: list[int] = []
    for place, samples, num_bytes in report.parts:
        group = asyncio.run(format_.group(place.removeprefix("#"), plan.about, read, {}))
        pieces = [file.read(start, end) for start, end in group.ranges]
        pieces += [MemoryShard(objects, key).read(start, end) for key, start, end in group.of_others]
        blocks = list(group.decode(pieces))
        found_bytes = sum(len(each.data) for each in blocks)
        if "windows" in plan.about:
            assert found_bytes == num_bytes
            found += _windows(records, samples, len(found), b"".join(each.data for each in blocks), parse)
            continue
        if shard.about.by_headers:
            if sum(len(each.lengths) for each in blocks) != samples or found_bytes > num_bytes:
                raise SampleDamaged("as pods say", blob=shard.key, sample=None, start=0, end=0)
        else:
            assert (sum(len(each.lengths) for each in blocks), found_bytes) == (samples, num_bytes)
        for block in blocks:
            found += block.lengths.tolist()
            ends = np.cumsum(block.lengths).tolist()
            for start, end in pairwise([0, *ends]):
                with suppress(SampleDamaged):
                    parse(memoryview(block.data)[start:end], 0)
    assert found == lengths or (shard.about.by_headers and len(found) == len(lengths))
    return len(found)


def _windows(
    records: list[RecordArray], count: int, first: int, data: bytes, parse: Callable[[memoryview, int], Any]
) -> list[int]:
    """The lengths of windows of a group, which are so many from the one with this number on."""
    of_group = np.concatenate(records)[first : first + count]
    _checked(of_group, len(data))
    for offset, length in zip(of_group["offset"].tolist(), of_group["length"].tolist(), strict=True):
        with suppress(SampleDamaged):
            parse(memoryview(data)[offset : offset + length], 0)
    return [int(each) for each in of_group["length"]]


def _checked(records: RecordArray, size_bytes: int) -> int:
    assert (records["offset"] >= 0).all()
    assert (records["length"] >= 0).all()
    assert (records["offset"] + records["length"] <= size_bytes).all()
    return len(records)
