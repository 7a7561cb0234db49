"""Does every loader worker ask for its part of the iterable form? A wrapper may run it in some of them only.

Positions are dealt to as many workers as torch says there are. Somebody else's generator around the dataset may leave
workers out (``datasets`` runs one for each shard), or end early in some. Then their parts are a hole, that others read
on behind. It is seen where the loader shows that a worker has ended (:mod:`refill.loops.loader_turns`); where a
worker's process ends before the loader does; and when a worker begins again that had come to the end of its own part,
while another had not asked for anything. What a loop leaves that stops early is none: some workers are ahead of others
then, by what the loader has under way.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from multiprocessing.synchronize import Event
from multiprocessing.util import Finalize, register_after_fork
from typing import Any, NamedTuple

import torch
import torch.utils.data

from refill.loops.loader_turns import LoaderDeals, LoaderTurns
from refill.loops.shared_blocks import share_again, shared_zeros

log = logging.getLogger(__name__)

_WORKERS = 256
_LOADER, _EPOCH, _EPOCH_BEFORE, _RANK, _WORKER, _OF, _START, _SIZE, _LENGTH, _UNDER_WAY, _TURNS, _ENDED = range(12)
_HAS_LEFT, _LEFT_LOADER = range(2)
_LAST = -1
"""The row of what began last."""
_FEW = 8
"""As many stretches may be all that a worker has, and be read before another one is there to ask for its first."""
_FAR_AHEAD = 512
"""Stretches by which no worker is ahead of another; as the pods' measure."""


class Part(NamedTuple):
    """The part of one worker: of the positions ``start`` to ``length``, each stretch of ``size`` at its turn."""

    worker: int
    workers: int
    rank: int
    epoch: int
    start: int
    size: int
    length: int

    def turn(self, worker: int, turn: int) -> tuple[int, int]:
        """The positions ``(start, end)``, end exclusive, of a worker's turn; empty after its last."""
        start = self.start + (worker + turn * self.workers) * self.size
        return start, max(start, min(start + self.size, self.length))


class Unasked(NamedTuple):
    """Positions ``start`` to ``end``, exclusive: those that a worker should have asked for next."""

    part: Part
    worker: int
    start: int
    end: int
    never: bool
    """Whether it has asked for nothing at all."""

    def __str__(self) -> str:
        never = "never asked" if self.never else "ceased to ask"
        return (
            f"in epoch {self.part.epoch} worker {self.worker} of {self.part.workers} loader workers {never} for its "
            f"positions, {self.start} to {self.end - 1} and so on, while worker {self.part.worker} read on"
        )


class WorkerParts:
    """Checks that every loader worker of one dataset object asks for its part. Picklable: loader workers share its
    memory, in which each one writes a row of its own."""

    def __init__(self, job: str) -> None:
        # What each worker asked for in the iteration that it began last: of which loader and epoch it was, the epoch of
        # the one before, its part, by how many turns it may be ahead of others when a loop stops, how many it has asked
        # for, and whether it came to the end of them.
        self._rows = shared_zeros((_WORKERS + 1, 12))
        # Whether each worker's process has ended before its loader did, and which loader that was.
        self._left = shared_zeros((_WORKERS, 2))
        register_after_fork(self, _watch_end)
        # An object that is made in a worker is that worker's own: of the others it knows nothing.
        self._is_shared = torch.utils.data.get_worker_info() is None
        if self._is_shared:
            Finalize(self, _say_what_was_left, args=(self._rows, self._left, job, os.getpid()), exitpriority=-100)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        share_again(self._rows, self._left)
        register_after_fork(self, _watch_end)  # a process that is spawned looks for it after this

    def left(self) -> list[Unasked]:
        """Fact: an iteration begins here. What an earlier one of this worker left out, as far as can be told; in a
        process that is no worker, the last one of all workers."""
        worker = torch.utils.data.get_worker_info()
        rows, left = self._rows.tolist(), self._left.tolist()
        if worker is None:
            return _left_of_last(rows, left)
        return _left_of(rows, left, worker.id) if worker.id < _WORKERS else []

    def forget(self, unasked: Unasked) -> None:
        """Fact: it was said."""
        self._rows[unasked.part.worker, _TURNS] = 0

    def part(self, part: Part, dealing: LoaderDeals) -> PartOfWorker | None:
        """Fact: this worker begins its part. None: it has nobody beside it."""
        if not 1 < part.workers <= _WORKERS:
            return None
        return PartOfWorker(part, self._rows, is_shared=self._is_shared, dealing=dealing)


class PartOfWorker:
    """One iteration of this worker."""

    def __init__(self, part: Part, rows: torch.Tensor, *, is_shared: bool, dealing: LoaderDeals) -> None:
        worker = torch.utils.data.get_worker_info()
        loader = 0 if worker is None else worker.seed - worker.id
        row = rows[part.worker]
        before = int(row[_EPOCH])
        # From 1 on, so that rows which nobody has written are of none.
        began = [loader, part.epoch + 1, before, part.rank, part.worker, part.workers, part.start, part.size]
        under_way = max(_FEW, -(-dealing.under_way // part.size))
        row[:] = torch.tensor([*began, part.length, under_way, 0, 0])
        rows[_LAST, _LOADER] = loader
        self._part = part
        self._rows = rows
        self._row = row
        self._is_shared = is_shared
        self.turns = LoaderTurns() if dealing.in_order else None
        self._known_to_have_ended = 0
        self._turns_then: list[int] = []
        """Of all workers, when that many had ended: those that have asked since are not among them."""
        self._judged = 0
        """When so many had ended, holes were found."""

    def goes_on(self) -> None:
        """Fact: one more sample is wanted."""
        if self.turns is not None:
            self.turns.look()

    def asks(self, turn: int, *, ended: bool) -> list[Unasked]:
        """Fact: this worker is about to ask for a turn of its part, or has come to the end there. Returns what others
        have left out by now; at least one of them will never ask for it."""
        if ended:
            self._row[_ENDED] = 1
        else:
            self._row[_TURNS] = turn + 1
        ended_elsewhere = 0 if self.turns is None else self.turns.ended(self._part.workers)
        if ended_elsewhere == 0 or ended_elsewhere == self._judged:
            return []
        turns = self._turns_of_all()
        if ended_elsewhere != self._known_to_have_ended:
            self._known_to_have_ended, self._turns_then = ended_elsewhere, turns
        others = [worker for worker in range(self._part.workers) if worker != self._part.worker]
        may_have_ended = [worker for worker in others if turns[worker] == self._turns_then[worker]]
        found = [left for worker in may_have_ended if (left := self._left_out(worker, turns[worker], turn)) is not None]
        # So many at most have ended as they should. All but one, where nothing is known of them.
        rightly = len(may_have_ended) - len(found) if self._is_shared else len(others) - 1
        if not found or ended_elsewhere <= rightly:
            return []
        self._judged = ended_elsewhere
        return found

    def _turns_of_all(self) -> list[int]:
        rows = self._rows.tolist()
        here = rows[self._part.worker][: _EPOCH + 1]
        return [row[_TURNS] if row[: _EPOCH + 1] == here else 0 for row in rows[: self._part.workers]]

    def _left_out(self, worker: int, asked: int, turn: int) -> Unasked | None:
        """Whether a worker that has asked for so many turns has left out two or more, when this one comes to ``turn``:
        by one, workers may differ that all end after as many samples."""
        start, end = self._part.turn(worker, asked)
        return Unasked(self._part, worker, start, end, never=not asked) if start < end and asked + 1 < turn else None


def _watch_end(parts: WorkerParts) -> None:
    """Fact: this process was started with them. It may be a loader's worker."""
    Finalize(parts, _ends, args=(parts._left,), exitpriority=100)


def _ends(left: torch.Tensor) -> None:
    """At the end of a process. A worker ends with its loader; one that ends before has nothing more to yield."""
    worker = torch.utils.data.get_worker_info()
    if worker is None or worker.id >= _WORKERS:
        return
    given = getattr(multiprocessing.current_process(), "_args", ())
    loader_is_done = next((each for each in given if isinstance(each, Event)), None)
    if loader_is_done is not None and not loader_is_done.is_set():
        left[worker.id, _LEFT_LOADER] = worker.seed - worker.id
        left[worker.id, _HAS_LEFT] = 1


def _left_of_last(rows: list[list[int]], left: list[list[int]]) -> list[Unasked]:
    """Of the iteration that began last."""
    loader = rows[_LAST][_LOADER]
    return [
        found for worker in range(_WORKERS) if rows[worker][_LOADER] == loader for found in _left_of(rows, left, worker)
    ]


def _left_of(rows: list[list[int]], left: list[list[int]], worker: int) -> list[Unasked]:
    """What others have not asked for in the iteration that this worker began last, and that is over."""
    mine = rows[worker]
    if not mine[_TURNS]:
        return []
    epoch = mine[_EPOCH]
    part = Part(worker, mine[_OF], mine[_RANK], epoch - 1, *mine[_START : _LENGTH + 1])
    last, _ = part.turn(worker, mine[_TURNS] - 1)
    found = []
    for other in range(part.workers):
        row = rows[other]
        if other == worker or row[_EPOCH_BEFORE] == epoch:
            continue  # it has begun again since, and what it asked for then is not known any more
        if row[_EPOCH] == epoch and row[_LOADER] != mine[_LOADER]:
            continue
        asked = row[_TURNS] + row[_ENDED] if row[_EPOCH] == epoch else 0
        start, end = part.turn(other, asked)
        ahead = mine[_TURNS] + mine[_ENDED] - asked
        if left[other] == [1, mine[_LOADER]]:
            most = 1
        else:
            most = mine[_UNDER_WAY] if mine[_ENDED] and not asked else _FAR_AHEAD
        if start < min(end, last) and ahead > most:
            found.append(Unasked(part, other, start, end, never=not asked))
    return found


def _say_what_was_left(rows: torch.Tensor, ended: torch.Tensor, job: str, process: int) -> None:
    """At exit, when no request comes any more that could fail."""
    if os.getpid() == process:
        for left in _left_of_last(rows.tolist(), ended.tolist())[:1]:
            log.warning(
                "rank %d of job %s lost samples: %s; a wrapper runs the dataset in some workers only: give the "
                "DataLoader num_workers=1, or the CacheIterableDataset itself (docs/TRAINERS.md)",
                left.part.rank,
                job,
                left,
            )
