"""Is every position that a sampler hands out asked for, or only a part of them? And in the batches that it composed?

What a rank asks of an epoch is a prefix of its trace, or all of it. A trainer that wraps samplers to divide them among
its processes leaves holes in it: samples that nobody would ever get. This is seen from the requests alone, without
knowing the trainer. In one process requests follow each other without a hole; loader workers are dealt the first
batches one after another (torch's DataLoader, whatever its ``in_order``), so what two neighbours among them ask for
first must join. What cannot be known here, the pods find when the rank comes to its next epoch.

Samplers of classes compose batches. A batch of another size is seen where it begins, or goes on into the next one.
"""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data

from refill.loops.shared_blocks import share_again, shared_zeros
from refill.protocol.wire_format import Int64Array

_WORKERS = 256
_ITERATION, _START, _PROCESS, _COMPOSED = range(4)
_SAID = -1
_FIRST, _FIRST_END, _END = 1, 2, 3


class Hole(NamedTuple):
    """Positions ``start`` to ``end``, exclusive, that were passed over; and what it looks like, in words."""

    start: int
    end: int
    pattern: str


class HoleGuard:
    """Notices positions that a sampler of one rank handed out and nobody asked for. Picklable: loader workers share its
    memory, in which each process writes a row of its own."""

    _thread: tuple[int, int]
    """The iteration, and the thread that asks for it; 0: several do."""

    def __init__(self) -> None:
        # Row 0 is for the training process, row 1 + w for worker w: the iteration that it asks for, where the first
        # batch that it asked for begins and ends, and where the last one ends. The last row is of the iteration itself:
        # its number, its first position, the process that iterates, and how many positions are in each batch that its
        # sampler has composed; 0: it composes none, -1: other batches came, and that was said.
        self._rows = shared_zeros((2 + _WORKERS, 4))
        self._forget_thread()

    def __getstate__(self) -> dict[str, Any]:
        return {"_rows": self._rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        share_again(self._rows)
        self._forget_thread()

    def begins(self, start: int, composed: int = 0) -> int:
        """Fact: a sampler of this process begins to hand out positions from ``start`` on. Returns the number of the
        iteration, which its positions carry.

        :param composed: so many of them belong together in a batch; 0: any do.
        """
        here = self._rows[-1]
        if here[_COMPOSED] != _SAID:
            here[_COMPOSED] = composed
        number = int(here[_ITERATION]) + 1
        here[_START], here[_PROCESS], here[_ITERATION] = start, os.getpid(), number
        return number

    def asks(self, iteration: int, positions: Int64Array) -> Hole | None:
        """Fact: this process is about to ask for these positions. Returns the hole that this shows, if any."""
        here = self._rows[-1].tolist()
        if not iteration or iteration != here[_ITERATION]:
            return None  # of an iteration that is over, or that began in another process
        start, end = int(positions.min()), int(positions.max()) + 1
        if end - start != len(positions):
            return _within(positions)
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.num_workers > 1:
            return self._of_workers(worker.id, worker.num_workers, iteration, here[_START], start, end)
        if worker is None and here[_PROCESS] != os.getpid():
            return None  # nobody knows what else is asked, and where
        return self._in_turn(iteration, here[_START], start, end)

    def other_batches(self, iteration: int, positions: Int64Array) -> int:
        """Whether these positions, which came as a batch, are none that the sampler has composed, nor the beginning of
        one: returns how many should have come, once; else 0. The last batch of an epoch may be shorter."""
        here = self._rows[-1]
        composed = int(here[_COMPOSED])
        if not iteration or iteration != here[_ITERATION] or composed <= 0:
            return 0
        if positions[0] % composed == 0 and len(positions) <= composed:
            return 0
        here[_COMPOSED] = _SAID
        return composed

    def _in_turn(self, iteration: int, first: int, start: int, end: int) -> Hole | None:
        """One process asks for everything, one batch after another."""
        row = self._rows[0]
        if self._thread != (iteration, threading.get_ident()):
            if self._thread[0] == iteration:
                self._thread = (iteration, 0)  # threads ask side by side: in any order
                return None
            self._thread = (iteration, threading.get_ident())
            row[_ITERATION], row[_END] = iteration, first
        expected = int(row[_END])
        row[_END] = max(end, expected)
        return Hole(expected, start, _batches(expected, start, end)) if start > expected else None

    def _of_workers(self, worker: int, workers: int, iteration: int, first: int, start: int, end: int) -> Hole | None:
        if workers > _WORKERS or int(self._rows[1 + worker, _ITERATION]) == iteration:
            return None
        mine = self._rows[1 + worker]
        mine[_FIRST], mine[_FIRST_END] = start, end
        mine[_ITERATION] = iteration
        firsts = self._rows[1 : 1 + workers].tolist()
        for before in (worker - 1, worker):
            if 0 <= before < workers - 1 and firsts[before][0] == firsts[before + 1][0] == iteration:
                # A loader that goes on from a state may deal to another worker first: then the later one has less.
                hole, after = firsts[before][_FIRST_END], firsts[before + 1]
                if after[_FIRST] > hole:
                    return Hole(hole, after[_FIRST], _batches(hole, after[_FIRST], after[_FIRST_END]))
        if all(row[0] == iteration for row in firsts):
            least = min(firsts, key=lambda row: row[_FIRST])
            if least[_FIRST] > first:
                return Hole(first, least[_FIRST], _batches(first, least[_FIRST], least[_FIRST_END]))
        return None

    def _forget_thread(self) -> None:
        self._thread = (0, 0)


def _within(positions: Int64Array) -> Hole | None:
    ordered = np.unique(positions)
    steps = np.diff(ordered)
    if not len(steps) or int(steps.max()) == 1:
        return None
    gap = int(np.argmax(steps > 1))
    step = int(steps[gap])
    regular = bool((steps == step).all())
    pattern = f"one of every {step} positions is asked for" if regular else "positions are left out within a batch"
    return Hole(int(ordered[gap]) + 1, int(ordered[gap + 1]), pattern)


def _batches(hole: int, start: int, end: int) -> str:
    size = end - start
    if (start - hole) % size:
        return f"{start - hole} positions are left out between two batches"
    return f"{(start - hole) // size} of {(start - hole) // size + 1} batches are left out"
