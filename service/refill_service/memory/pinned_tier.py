"""What stays on the pod from epoch to epoch and from job to job? The first samples of a share, in memory, then on disk.

Every sample is read once an epoch, so which part of a share is kept makes no difference to how much is saved: a
prefix, filled as its chunks are read and never evicted while a job uses it (CoorDL's rule: cache until full, never
evict). A prefix serves jobs of every chunk size, and a position in it follows from the index, so memory and file are
plain arrays of samples back to back, and a file needs no table of its own that could be torn.

Jobs share by proof, not by what an index says of itself: the same place in the store, and the same length and checksum
of each sample, in the records that each job has read on its own. Where records have no checksums, it is the same ranges
of the same versions of objects: the place names those, and only what this pod has written itself is read from disk.
What lies in memory was verified when it was put there, and a job verifies once more what another job has put there.
What lies on disk is verified by the job's own records each time it is read: a half-written, damaged or foreign file is
read again from the store, and never served.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from refill.protocol.wire_format import Int64Array
from refill_service.cache_core.dataset_index import SampleRecords, UInt64Array, sample_checksum
from refill_service.cache_core.record_pieces import Records
from refill_service.memory.folder_lock import locked, open_or_make
from refill_service.memory.payload import Payload

log = logging.getLogger(__name__)

_BLOCK = 1 << 16
"""Samples."""
_SUFFIX = ".pinned"

_MAX_WRITING_BYTES = 16 << 20
"""Bytes that wait for the disk; a chunk that comes then is not kept."""


class PinnedTier:
    """What a pod keeps, of all datasets. A dataset that no job uses gives way when another one wants the room.

    :param folder: for the part on disk; None: there is none. It belongs to one pod at a time. Raises
        :class:`InvalidInput` when it can't be used.
    """

    def __init__(self, memory_bytes: int, folder: Path | None = None, disk_bytes: int = 0) -> None:
        self.memory_bytes = memory_bytes
        self.disk_bytes = disk_bytes
        self._folder = folder
        self._lock = None if folder is None else locked(folder, "pinned_dir")
        self.shares: tuple[PinnedShare, ...] = ()
        """The one longest unused first. Another one when it changes, which it may in any thread."""
        self._damaged_in_dropped = 0
        self._leasing, self._counting = threading.Lock(), threading.Lock()
        self._one_at_a_time = asyncio.Lock()

    def close(self) -> None:
        """Files stay, for the next pod of this name."""
        for share in self.shares:
            share.close()
        self.shares = ()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def used_memory_bytes(self) -> int:
        return sum(part.used_bytes for share in self.shares for part in share.parts if part.in_memory)

    @property
    def used_disk_bytes(self) -> int:
        return sum(part.used_bytes for share in self.shares for part in share.parts if not part.in_memory)

    @property
    def damaged_samples(self) -> int:
        """Samples that were found damaged on disk, since the pod started."""
        here = sum(part.damaged_samples for share in self.shares for part in share.parts)
        return here + self._damaged_in_dropped

    async def leased(self, place: str, records: Records) -> PinnedShare:
        """As :meth:`lease`, in a thread: it looks through all records, and waits for the disk. However many jobs come,
        they take one of the threads that others wait for."""

        async def in_turn() -> PinnedShare:
            async with self._one_at_a_time:
                return await asyncio.to_thread(self.lease, place, records)

        def given_up(done: asyncio.Task[PinnedShare]) -> None:
            if not done.cancelled() and done.exception() is None:
                self.release(done.result())

        leasing = asyncio.create_task(in_turn())
        try:
            return await asyncio.shield(leasing)
        except asyncio.CancelledError:
            leasing.add_done_callback(given_up)
            raise

    def lease(self, place: str, records: Records) -> PinnedShare:
        """The pinned part of a dataset's share, for one more job. Give it back with :meth:`release`. One thread at a
        time carries it out.

        :param place: the dataset's URL, in the one way to write it. Checksums alone prove nothing: whoever writes an
            index could make bytes that fit them.
        """
        with self._leasing:
            share = next((known for known in self.shares if known.is_of(place, records)), None)
            if share is not None:
                self._leaves(share)
                if share.num_jobs == 0 and self._would_grow(share, int(records.length.sum())):
                    self._drop(share)
                    share = None
            if share is None:
                share = self._new_share(place, records)
            if share.parts:
                self.shares = (*self.shares, share)
            with self._counting:
                share.num_jobs += 1
            return share

    def release(self, share: PinnedShare) -> None:
        with self._counting:
            share.num_jobs -= 1

    def _leaves(self, share: PinnedShare) -> None:
        self.shares = tuple(each for each in self.shares if each is not share)

    def _new_share(self, place: str, records: Records) -> PinnedShare:
        parts: list[PinnedPart] = []
        wanted = int(records.length.sum())
        self._make_room(wanted, in_memory=True)
        memory = _prefix(records, self._free_bytes(in_memory=True))
        if len(memory):
            parts.append(PinnedMemory(memory))
        if self._folder is not None:
            rest = records.between(len(memory), len(records))
            name = self._folder / _file_name(place, rest)
            self._make_room(wanted - int(memory.length.sum()), in_memory=False)
            self._remove_leftovers(name, wanted - int(memory.length.sum()))
            free = self._free_bytes(in_memory=False) - sum(_size(path) for path in self._leftovers())
            # What an earlier pod of this name left for this very share is used again.
            on_disk = _prefix(rest, free + _size(name))
            if len(on_disk):
                try:
                    parts.append(PinnedFile(on_disk, name))
                except OSError as error:
                    log.warning("%s: %s; nothing is kept there", name, error.strerror)
        return PinnedShare(parts, place)

    def _free_bytes(self, *, in_memory: bool, unused: bool = False) -> int:
        """
        :param unused: count as free what no job uses.
        """
        taken = [share for share in self.shares if share.num_jobs or not unused]
        parts = [part for share in taken for part in share.parts if part.in_memory == in_memory]
        return (self.memory_bytes if in_memory else self.disk_bytes) - sum(part.limit_bytes for part in parts)

    def _would_grow(self, share: PinnedShare, wanted: int) -> bool:
        """Whether a share that no job uses would be larger if it were leased anew."""
        free = self._free_bytes(in_memory=True, unused=True) + self._free_bytes(in_memory=False, unused=True)
        return share.limit_bytes < 0.9 * min(wanted, free)

    def _make_room(self, wanted: int, *, in_memory: bool) -> None:
        """Drop what no job uses, the one longest unused first, until there is room or nothing is left to drop."""
        wanted = min(wanted, self.memory_bytes if in_memory else self.disk_bytes)
        for share in [known for known in self.shares if known.num_jobs == 0]:
            if self._free_bytes(in_memory=in_memory) >= wanted:
                return
            if any(part.in_memory == in_memory for part in share.parts):
                self._leaves(share)
                self._drop(share)

    def _drop(self, share: PinnedShare) -> None:
        self._damaged_in_dropped += sum(part.damaged_samples for part in share.parts)
        share.close(forget=True)

    def _leftovers(self) -> list[Path]:
        """Files of datasets that nobody leased since the pod started, the oldest first."""
        if self._folder is None:
            return []
        leased = {part.path for share in self.shares for part in share.parts if isinstance(part, PinnedFile)}
        found = [path for path in self._folder.glob(f"*{_SUFFIX}") if path not in leased]
        return sorted(found, key=lambda path: path.lstat().st_mtime)

    def _remove_leftovers(self, keep: Path, wanted: int) -> None:
        leftovers = [path for path in self._leftovers() if path != keep]
        free = self._free_bytes(in_memory=False) - sum(map(_size, leftovers))
        for path in leftovers:
            if free >= wanted:
                return
            size = _size(path)
            with contextlib.suppress(OSError):
                path.unlink()
                free += size


class PinnedShare:
    """The pinned part of one share: at most one part in memory, and one on disk after it."""

    def __init__(self, parts: Sequence[PinnedPart], place: str = "") -> None:
        self.parts = parts
        self.place = place
        self.num_jobs = 0
        self._being_read: dict[int, asyncio.Future[None]] = {}
        """Samples that some job reads from the store now: who wants them, too, can wait for it."""

    @property
    def limit_bytes(self) -> int:
        """What it holds when it is full."""
        return sum(part.limit_bytes for part in self.parts)

    def is_of(self, place: str, records: Records) -> bool:
        """Whether a job with these records may share it: as far as they go, they are those of who filled it."""
        if place != self.place:
            return False
        agree = [_agree(part.records, records) for part in self.parts]
        return True in agree and False not in agree

    def part_for(self, first: int, end: int) -> PinnedPart | None:
        """The part that holds, or may hold, all samples ``[first, end)``."""
        for part in self.parts:
            if part.records.covers(first, end):
                return part
        return None

    def coming(self, first: int, end: int) -> set[asyncio.Future[None]]:
        """The reads under way of samples ``[first, end)``."""
        return {self._being_read[sample] for sample in range(first, end) if sample in self._being_read}

    def announce(self, chunks: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """Samples ``[first, end)`` of each are being read from now on, until what is returned is called, once or
        more."""
        here: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        samples = [sample for first, end in chunks for sample in range(first, end) if sample not in self._being_read]
        self._being_read.update(dict.fromkeys(samples, here))

        def ended() -> None:
            if not here.done():
                for sample in samples:
                    del self._being_read[sample]
                here.set_result(None)

        return ended

    def close(self, *, forget: bool = False) -> None:
        for part in self.parts:
            part.close(forget=forget)


class PinnedPart(ABC):
    """Samples of ``records`` back to back, each there or not."""

    in_memory: bool

    def __init__(self, records: Records) -> None:
        self.records = records
        self.damaged_samples = 0
        self.used_bytes = 0
        """Of the samples that are there."""
        self._starts = np.concatenate([[0], np.cumsum(records.length)])
        self._there = np.zeros(len(records), dtype=bool)

    @property
    def limit_bytes(self) -> int:
        return int(self._starts[-1])

    def _are_there(self, places: slice, *, there: bool) -> None:
        """Fact: all of these are, or none of them."""
        changed = self._there[places] != there
        changed_bytes = int(self.records.length[places][changed].sum())
        self.used_bytes += changed_bytes if there else -changed_bytes
        self._there[places] = there

    def _none_is_there(self) -> None:
        self._there[:] = False
        self.used_bytes = 0

    def holds(self, first: int, end: int) -> bool:
        """Whether all samples ``[first, end)`` are there, as far as is known without reading them."""
        return bool(self._there[self._places(first, end)].all())

    def _places(self, first: int, end: int) -> slice:
        place = self.records.place(first)
        return slice(place, place + end - first)

    def _bounds(self, first: int, end: int) -> Int64Array:
        """Where each of the samples starts, then where the last one ends."""
        places = self._places(first, end)
        return self._starts[places.start : places.stop + 1]

    @abstractmethod
    async def load(self, first: int, end: int) -> list[Payload] | None:
        """The samples ``[first, end)``, intact; None when one of them is not."""

    @abstractmethod
    def close(self, *, forget: bool) -> None: ...


class PinnedMemory(PinnedPart):
    """The part of a share that is kept in memory."""

    in_memory = True

    def __init__(self, records: Records) -> None:
        super().__init__(records)
        # Pages come into being as they are written. Freed when the last view of a sample is gone.
        self._memory = memoryview(mmap.mmap(-1, max(1, self.limit_bytes)))

    def views(self, first: int, end: int) -> list[Payload]:
        """The samples' bytes, not copied; they never change."""
        bounds = self._bounds(first, end).tolist()
        return [self._memory[start:stop] for start, stop in pairwise(bounds)]

    async def load(self, first: int, end: int) -> list[Payload] | None:
        return self.views(first, end) if self.holds(first, end) else None

    def put(self, first: int, payloads: Sequence[Payload]) -> NDArray[np.bool_]:
        """Keep intact samples from ``first`` on. Returns which of them were not there yet; the others are left as they
        are, since somebody may be sending them."""
        end = first + len(payloads)
        places = self._places(first, end)
        new = ~self._there[places]
        views = self.views(first, end)
        for i in np.flatnonzero(new).tolist():
            views[i][:] = payloads[i]  # type: ignore[index]
        self._are_there(places, there=True)
        return new

    def forget(self, first: int, end: int, damaged: int) -> None:
        """Fact: so many of the samples ``[first, end)`` are not what they should be."""
        self.damaged_samples += damaged
        self._are_there(self._places(first, end), there=False)

    def close(self, *, forget: bool) -> None:
        self._none_is_there()


class PinnedFile(PinnedPart):
    """The part of a share that is kept on disk."""

    in_memory = False

    def __init__(self, records: Records, path: Path) -> None:
        super().__init__(records)
        self.path = path
        self._full = False
        self._writing_bytes = 0
        # Closed when it is closed here and no thread is at work on it any more.
        self._file = os.fdopen(open_or_make(path), "r+b", buffering=0)
        self._file.truncate(self.limit_bytes)
        os.utime(path)
        self._checksums = records.checksum if records.has_checksums else np.zeros(len(records), dtype=np.uint64)
        if not records.has_checksums:
            return  # nobody can say whether what an earlier pod wrote is intact
        # What was written before is taken to be there; whether it is intact, its checksums will show.
        for start, stop in _written(self._file.fileno()):
            first, end = np.searchsorted(self._starts, start), np.searchsorted(self._starts, stop, side="right") - 1
            self._are_there(slice(first, max(first, end)), there=True)

    async def load(self, first: int, end: int) -> list[Payload] | None:
        if not self.holds(first, end):
            return None
        found = await asyncio.to_thread(self._read_intact, self._file, first, end)
        if found is None:
            self._are_there(self._places(first, end), there=False)
        return found

    async def keep(self, first: int, payloads: Sequence[bytes]) -> None:
        """Keep intact samples from ``first`` on. Nothing is kept of what comes faster than the disk takes it: there are
        more epochs."""
        end = first + len(payloads)
        size = int(self._bounds(first, end)[-1] - self._bounds(first, end)[0])
        if self._full or self.holds(first, end) or self._writing_bytes > _MAX_WRITING_BYTES:
            return
        self._writing_bytes += size
        try:
            await asyncio.to_thread(self._write, self._file, first, end, payloads)
            if not self.records.has_checksums:
                self._checksums[self._places(first, end)] = [sample_checksum(payload) for payload in payloads]
            self._are_there(self._places(first, end), there=True)
        except OSError as error:
            if not self._full:  # several are written at once
                log.warning("%s: %s; nothing more is kept there", self.path, error.strerror)
            self._full = True
        finally:
            self._writing_bytes -= size

    def close(self, *, forget: bool) -> None:
        self._none_is_there()
        self._full = True
        del self._file
        if forget:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _read_intact(self, file: FileIO, first: int, end: int) -> list[Payload] | None:
        bounds = self._bounds(first, end)
        try:
            data = memoryview(os.pread(file.fileno(), int(bounds[-1] - bounds[0]), int(bounds[0])))
        except OSError as error:
            log.warning("%s: %s", self.path, error.strerror)
            return None
        bounds = bounds - bounds[0]
        payloads = [bytes(data[start:stop]) for start, stop in pairwise(bounds)]
        checksums = self._checksums[self._places(first, end)].tolist()
        damaged = sum(sample_checksum(data) != sum_ for data, sum_ in zip(payloads, checksums, strict=True))
        self.damaged_samples += damaged
        return None if damaged else list(payloads)

    def _write(self, file: FileIO, first: int, end: int, payloads: Sequence[bytes]) -> None:
        data, place = memoryview(b"".join(payloads)), int(self._bounds(first, end)[0])
        while data:
            written = os.pwrite(file.fileno(), data, place)
            data, place = data[written:], place + written


def _agree(one: Records, other: Records) -> bool | None:
    """Whether lengths and checksums are equal of all samples that both hold, or lengths and offsets where there are no
    checksums. None: there is none."""
    if one.has_checksums != other.has_checksums:
        return False
    if isinstance(one, SampleRecords) and isinstance(other, SampleRecords):
        first, end = max(one.first_sample, other.first_sample), min(one.end_sample, other.end_sample)
        if first >= end:
            return None
        one, other = one.part(first, end), other.part(first, end)
        return np.array_equal(one.length, other.length) and np.array_equal(_proof(one), _proof(other))
    found = None
    for start in range(0, len(one), _BLOCK):  # of all at once this would take many times their memory
        ids = one.ids(start, min(len(one), start + _BLOCK))
        here = _held(other, ids)
        if here.any():
            found, there = True, other.places(ids[here])
            if not (
                np.array_equal(one.length[start : start + _BLOCK][here], other.length[there])
                and np.array_equal(_proof(one)[start : start + _BLOCK][here], _proof(other)[there])
            ):
                return False
    return found


def _held(records: Records, ids: Int64Array) -> NDArray[np.bool_]:
    """Which of some samples ``(n,)`` these are records of."""
    if isinstance(records, SampleRecords):
        return (records.first_sample <= ids) & (ids < records.end_sample)
    if not len(records):
        return np.zeros(len(ids), dtype=bool)
    piece = np.searchsorted(records.end, ids, side="right")
    found: NDArray[np.bool_] = ids >= records.first[np.minimum(piece, len(records.first) - 1)]
    return found & (piece < len(records.first))


def _proof(records: Records) -> Int64Array | UInt64Array:
    """What is the same only of the same bytes of a place."""
    return records.checksum if records.has_checksums else records.offset


def _file_name(place: str, records: Records) -> str:
    """Another one for another place, or other records."""
    of_place = hashlib.blake2b(place.encode(), digest_size=16).hexdigest()
    of_records = xxhash.xxh3_128()
    if isinstance(records, SampleRecords):
        of_records.update(str(records.first_sample).encode())
    else:
        of_records.update(records.first.tobytes() + records.end.tobytes())
    for column in (records.length, _proof(records)):
        of_records.update(np.ascontiguousarray(column).data)
    return f"{of_place}-{of_records.hexdigest()}{_SUFFIX}"


def _prefix(records: Records, limit_bytes: int) -> Records:
    """Those of as many of the first samples as fit."""
    fitting = 0
    while limit_bytes > 0 and fitting < len(records):  # block by block: sums of all would take memory, and a while
        ends = np.cumsum(records.length[fitting : fitting + _BLOCK])
        num_fitting = int(np.searchsorted(ends, limit_bytes, side="right"))
        fitting += num_fitting
        limit_bytes = limit_bytes - int(ends[-1]) if num_fitting == len(ends) else 0
    return records.between(0, fitting)


def _written(file: int) -> Iterator[tuple[int, int]]:
    """The byte ranges ``[start, stop)`` of a sparse file that were written."""
    place = 0
    while True:
        try:
            place = os.lseek(file, place, os.SEEK_DATA)
        except OSError:  # nothing after this place
            return
        stop = os.lseek(file, place, os.SEEK_HOLE)
        yield place, stop
        place = stop


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0
