"""WebDataset: which samples do tars hold? Their headers lie between the samples, so all of it is read, once.

Every ``*.tar`` below the URL is read in ranges of 8 MiB, ``--jobs`` tars at a time, each in a process of its own
(threads of one process where all tars together have less than 256 MB). As in ``webdataset``, directories, links and
files without an extension belong to no sample. A key that comes again later in the same tar is a sample of its own;
``index`` warns of it.

Refused: ``.tar.gz`` and the like; a tar that is cut off (without an end mark), takes more than 1 MiB of headers for one
member, chains them without end, or describes sparse files. Tested against webdataset 1.0.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import xxhash

from refill.errors import EmptyDataset
from refill_service.cache_core.dataset_index import RECORD, RecordArray
from refill_service.formats.interface import (
    Listing,
    Options,
    Plan,
    Shard,
    ShardBytes,
    ShardReport,
    Source,
    checked_windows,
)
from refill_service.formats.shard_reader import ShardStream, key_of, members_of, read_shard

NAME = "webdataset"


def found(listing: Listing, options: Options) -> bool:
    return bool(listing.named(".tar"))


async def plan(listing: Listing, source: Source, options: Options) -> Plan:
    shards = [Shard.of(each) for each in listing.objects if each.key.endswith(".tar")]
    if not shards:
        raise EmptyDataset(f"{listing.url} holds no .tar")
    if options.windows is None:
        return Plan(f"{len(shards):,} tars", shards, {}, reads_all=True)
    length, stride = checked_windows(*options.windows)
    about = {"windows": [length, stride]}
    shards = [replace(each, about=(length, stride)) for each in shards]
    why = f"{len(shards):,} tars; a sample is {length:,} of a folder in a tar, one each {stride:,}"
    return Plan(why, shards, about, reads_all=True, overlaps=stride < length, passed_over="samples of tars")


def scan(shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]:
    if shard.about is None:
        return read_shard(shard.key, data.source, shard.size_bytes, data.read, report)
    return read_windows(shard.key, data.source, shard.size_bytes, data.read, report, *shard.about)


_BATCH = 4096


def read_windows(
    name: str,
    source: str,
    size_bytes: int,
    read_range: Callable[[int, int], memoryview],
    report: ShardReport,
    length: int,
    stride: int,
) -> Iterator[RecordArray]:
    """The records of the windows of a shard, in batches: samples in a row, in one folder of the tar, or in none. A
    window is the bytes from the first member of its first sample to the last one of its last. All is read once, front
    to back, for two windows at a time at most: strides are half of the length or more.

    Parameters and errors are those of ``read_shard``.
    """
    stream = ShardStream(size_bytes, read_range)
    windows = _Windows(length, stride)
    for member, header, header_start in members_of(name, source, size_bytes, stream):
        key = key_of(member.name) if member.isreg() else None
        before = member.offset - header_start  # a global pax header may come before the member, and is not its own
        windows.bytes_came(memoryview(header)[:before])
        if key is not None:
            windows.member_begins(key, member.offset)
        windows.bytes_came(memoryview(header)[before:])
        for piece in stream.pieces_to(stream.archive_offset):
            windows.bytes_came(piece)
        if key is not None:
            windows.member_ended(stream.archive_offset)
        if len(windows.found) >= _BATCH:
            yield windows.take()
    windows.sample_ended()
    report.num_passed_over = windows.num_samples - windows.num_covered
    if windows.found:
        yield windows.take()


class _Window:
    """One of which not all samples were met."""

    def __init__(self, start: int, place: int) -> None:
        self.start = self.end = start
        self.place = place
        """Of its first sample in the episode."""
        self._hasher = self._until_end = xxhash.xxh3_64()

    def bytes_came(self, piece: memoryview) -> None:
        if self._until_end is self._hasher and self.end > self.start:
            self._until_end = self._hasher.copy()  # they count if another member of the window follows
        self._hasher.update(piece)

    def member_ended(self, place: int) -> None:
        self.end, self._until_end = place, self._hasher

    def record(self) -> tuple[int, int, int]:
        return self.start, self.end - self.start, self._until_end.intdigest()


class _Windows:
    """What is known of a tar, by the members that came so far."""

    def __init__(self, length: int, stride: int) -> None:
        self._length, self._stride = length, stride
        self.found: list[tuple[int, int, int]] = []
        self.num_samples = self.num_covered = 0
        """And how many of them lie in windows."""
        self._key: str | None = None
        self._place = -1
        """Of the last sample, in its episode."""
        self._covered = 0
        """Samples of the episode, from its first on, that lie in windows, or between two."""
        self._open: list[_Window] = []

    def member_begins(self, key: str, offset: int) -> None:
        if key == self._key:
            return
        self.sample_ended()
        same_episode = self._key is not None and key.rpartition("/")[0] == self._key.rpartition("/")[0]
        if not same_episode:
            self._open.clear()
        self._place, self._covered = (self._place + 1, self._covered) if same_episode else (0, 0)
        self._key, self.num_samples = key, self.num_samples + 1
        if self._place % self._stride == 0:
            self._open.append(_Window(offset, self._place))

    def bytes_came(self, piece: memoryview) -> None:
        for window in self._open:
            window.bytes_came(piece)

    def member_ended(self, place: int) -> None:
        for window in self._open:
            window.member_ended(place)

    def sample_ended(self) -> None:
        """The one that was met last has no more members."""
        end = self._place + 1
        if self._open and self._open[0].place + self._length == end:
            window = self._open.pop(0)
            self.found.append(window.record())
            self.num_covered += end - max(window.place, self._covered)
            self._covered = end

    def take(self) -> RecordArray:
        found, self.found = np.array(self.found, dtype=RECORD), []
        return found
