"""Which chunks that one job has read does another one take, in place of reading them again?

Jobs of a sweep that have one ``read_seed`` read the chunks of a share in one order, and each sends the samples in an
order of its own. So whoever reads a chunk has it for the others, too: for those that want it in this moment, and for
those that are behind and will want it soon. Of a chunk that is kept for others some samples are in the memory of the
job that has read it, where they count; those that it has sent are what keeping takes.

What is kept is bounded twice. A job that is behind by more than half of what the reader's memory is planned for is let
go: nothing is kept for it, until it has come nearer. And what keeping takes has a limit for each job; beyond it what
began last to leave that memory gives way. Whoever does not find a chunk reads it. Nobody ever waits but for a read that
has begun.

Another job may begin a little later. So a job that begins keeps what it reads first, as if there were one already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from refill_service.cache_core.fair_queue import Need
from refill_service.cache_core.planned.share_memory import ShareMemory

_REACH_PART = 2
"""Of the places that a job's memory is planned for: so far others may be behind it."""
_BESIDE_CHUNK_BYTES, _BESIDE_PLACE_BYTES, _BESIDE_GONE_BYTES = 600, 8, 60
"""What keeping takes beside the bytes of samples: for each chunk, for each of its places, and for each sample that has
left memory."""

Piece = TypeVar("Piece")
"""The bytes of a sample."""
_Key = tuple[int, int]
"""``(epoch, chunk)``"""


@dataclass(eq=False)
class ReadUnderWay(Generic[Piece]):
    """One that has begun. Samples are told by their places in the chunk."""

    job: ShareMemory
    key: _Key
    places: list[int]
    need: Need
    """Of the job that reads it."""
    pieces: dict[int, Piece] = field(default_factory=dict)
    """Of intact samples, by place, once they have come."""
    when_ended: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class _Kept(Generic[Piece]):
    """A chunk that a job has read, kept for others."""

    pieces: list[Piece | None]
    """By place; None: it is not here."""
    wanted_by: set[ShareMemory | None]
    """None: by a job that may yet begin."""
    kept_bytes: int = 0
    """What keeping it takes, beside the memory of the job that has read it."""


class _Job(Generic[Piece]):
    def __init__(self) -> None:
        self.limit_bytes = self.kept_bytes = 0
        self.kept: dict[_Key, _Kept[Piece]] = {}
        """What was read first comes first."""
        self.partly_gone: dict[_Key, None] = {}
        """Of those, the ones whose samples have begun to leave its memory: now keeping them takes something."""
        self.began_at: int | None = None
        """The place where it was asked first; None: it was not."""
        self.is_new = True
        """Whether it is not far from there."""


class SharedChunks(Generic[Piece]):
    """Of one share at one pod: the jobs that read it in one order, and what they have read for each other."""

    def __init__(self) -> None:
        self._jobs: dict[ShareMemory, _Job[Piece]] = {}
        self._under_way: dict[_Key, list[ReadUnderWay[Piece]]] = {}

    # Who takes part.

    def joined(self, job: ShareMemory) -> None:
        self._jobs[job] = _Job()

    def left(self, job: ShareMemory) -> None:
        """Fact: the job reads no more here. What it has kept is forgotten. It may have left before."""
        self._jobs.pop(job, None)
        for other in self._jobs.values():
            self._no_longer_wanted(other, list(other.kept), job)

    def may_keep(self, job: ShareMemory, limit_bytes: int) -> None:
        """Fact: what a job keeps for others may take so much."""
        if (found := self._jobs.get(job)) is not None:
            found.limit_bytes = limit_bytes
            self._keep_within_limit(found)

    def kept_bytes(self, job: ShareMemory) -> int:
        """What a job keeps for others takes so much beside its memory; 0: it keeps nothing."""
        return self._jobs[job].kept_bytes if job in self._jobs else 0

    # Before a chunk is read.

    def find(self, job: ShareMemory, epoch: int, chunk: int, places: list[int]) -> list[Piece] | None:
        """The bytes of samples at these places of a chunk, if another job has kept all of them."""
        for other, found in self._jobs.items():
            if other is not job and (kept := found.kept.get((epoch, chunk))) is not None:
                there = [piece for place in places if (piece := kept.pieces[place]) is not None]
                if len(there) == len(places):
                    return there
        return None

    def coming(
        self, job: ShareMemory, epoch: int, chunk: int, places: list[int], need: Need
    ) -> ReadUnderWay[Piece] | None:
        """A read of another job that will bring all of these samples. Whom somebody waits for takes none that is ahead
        of need: that one may wait for its turn long.

        :param need: of these samples.
        """
        for read in self._under_way.get((epoch, chunk), ()):
            is_in_time = read.need.due is not None or need.due is None
            if read.job is not job and is_in_time and set(places) <= set(read.places):
                return read
        return None

    def begins(self, job: ShareMemory, epoch: int, chunk: int, places: list[int], need: Need) -> ReadUnderWay[Piece]:
        """Fact: a job reads these samples now. Whatever becomes of it, :meth:`ended` follows."""
        read: ReadUnderWay[Piece] = ReadUnderWay(job, (epoch, chunk), places, need)
        self._under_way.setdefault(read.key, []).append(read)
        return read

    # What becomes of it.

    def came(self, read: ReadUnderWay[Piece], pieces: Sequence[Piece | None], gone_bytes: list[int]) -> None:
        """Fact: samples of a read are here.

        :param pieces: of its places; None for one that is damaged.
        :param gone_bytes: of each of those that the job's memory does not hold.
        """
        read.pieces = {place: piece for place, piece in zip(read.places, pieces, strict=True) if piece is not None}
        job, key, reader = read.job, read.key, self._jobs.get(read.job)
        if reader is None:
            return
        self.has(job, *key)
        self._let_go(job, reader)
        wanted_by = {other for other in (*self._jobs, None) if self._wants(other, job, reader, key)}
        if not wanted_by:
            return
        if (kept := reader.kept.get(key)) is None:
            kept = reader.kept[key] = _Kept([None] * job.size_of(key[1]), set())
            self._takes(reader, key, _BESIDE_CHUNK_BYTES + _BESIDE_PLACE_BYTES * len(kept.pieces))
        for place, piece in read.pieces.items():
            kept.pieces[place] = piece
        kept.wanted_by |= wanted_by
        if gone_bytes:
            self._are_gone(reader, key, gone_bytes)
        self._keep_within_limit(reader)

    def ended(self, read: ReadUnderWay[Piece]) -> None:
        """Fact: what has come of a read is all that will."""
        reads = self._under_way[read.key]
        reads.remove(read)
        if not reads:
            del self._under_way[read.key]
        for tell in read.when_ended:
            tell()

    def has(self, job: ShareMemory, epoch: int, chunk: int) -> None:
        """Fact: what a job has read or taken of a chunk is in its memory. If that is all, it wants no more of it."""
        if job.lacks(epoch, chunk):
            return
        for other in self._jobs.values():
            self._no_longer_wanted(other, [(epoch, chunk)], job)

    def gone(self, job: ShareMemory, epoch: int, samples: Iterable[tuple[int, int]]) -> None:
        """Fact: a job's memory does not hold samples any more.

        :param samples: ``(chunk, bytes)`` of each.
        """
        if (found := self._jobs.get(job)) is None:
            return
        for chunk, num_bytes in samples:
            if (epoch, chunk) in found.kept:
                self._are_gone(found, (epoch, chunk), [num_bytes])
        self._keep_within_limit(found)

    # How it comes to that.

    @staticmethod
    def _wants(other: ShareMemory | None, job: ShareMemory, reader: _Job[Piece], key: _Key) -> bool:
        """Whether another job, or one that may yet begin where this one did, is not far behind and lacks a chunk. One
        that nobody has asked for anything yet is not here."""
        if other is None:
            return reader.is_new
        return other is not job and _is_near(other.place, job) and other.lacks(*key)

    def _let_go(self, job: ShareMemory, reader: _Job[Piece]) -> None:
        """Of what was kept first, what nobody will want any more."""
        if reader.began_at is None:
            reader.began_at = job.place
        else:
            reader.is_new = reader.is_new and _is_near(reader.began_at, job)
        while reader.kept:
            key, kept = next(iter(reader.kept.items()))
            kept.wanted_by = {other for other in kept.wanted_by if self._wants(other, job, reader, key)}
            if kept.wanted_by:
                return
            self._forget(reader, key)

    def _are_gone(self, reader: _Job[Piece], key: _Key, gone_bytes: list[int]) -> None:
        reader.partly_gone.setdefault(key)
        self._takes(reader, key, sum(gone_bytes) + _BESIDE_GONE_BYTES * len(gone_bytes))

    @staticmethod
    def _takes(reader: _Job[Piece], key: _Key, more_bytes: int) -> None:
        reader.kept[key].kept_bytes += more_bytes
        reader.kept_bytes += more_bytes

    def _no_longer_wanted(self, reader: _Job[Piece], keys: list[_Key], by: ShareMemory) -> None:
        for key in keys:
            if (kept := reader.kept.get(key)) is not None and by in kept.wanted_by:
                kept.wanted_by.discard(by)
                if not kept.wanted_by:
                    self._forget(reader, key)

    def _keep_within_limit(self, reader: _Job[Piece]) -> None:
        """What began last to leave memory gives way: it is wanted last. If it were what began first, others would find
        nothing as soon as there is too much. What a job wants that is here goes after what one may want that is not,
        and last of all what lies in memory as a whole: forgetting that would free nearly nothing."""
        while reader.kept_bytes > reader.limit_bytes and reader.kept:
            keys = reader.partly_gone or reader.kept
            for_new = (key for key in reversed(keys) if reader.is_new and reader.kept[key].wanted_by == {None})
            self._forget(reader, next(for_new, next(reversed(keys))))

    def _forget(self, reader: _Job[Piece], key: _Key) -> None:
        reader.kept_bytes -= reader.kept.pop(key).kept_bytes
        reader.partly_gone.pop(key, None)


def _is_near(place: int | None, job: ShareMemory) -> bool:
    """Whether a place is not far behind that of a job; None is not."""
    return place is not None and (job.place or 0) - place <= job.planned_places // _REACH_PART
