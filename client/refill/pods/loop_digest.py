"""What has the loop of a rank had so far, as a number? Workers say what they received, the loop says what it was given.

A worker notes the hash of each position that it receives, in memory that the processes of a rank share, before its
batch goes to the loop. The loop sums the hashes of its batches (:mod:`refill.protocol.receipt_digest`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from refill.protocol.dealing import Dealing
from refill.protocol.position_set import PositionSet
from refill.protocol.receipt_digest import DigestPart, sample_hashes, sum_of_hashes
from refill.protocol.wire_format import Int64Array

_MOST_POSITIONS = 1 << 40
_EPOCHS = 1 << 22
_KEPT_EPOCHS = 2


class ReceivedHashes:
    """Hashes of what the processes of a rank received last, each at its position's place.

    :param shared: zeros, int64, in memory that these share, of shape ``SHAPE``.
    """

    NUM_PLACES = 1 << 16
    """More positions than loaders ask for ahead of their loop. Of one that asks for more, some are not counted."""
    SHAPE = (3, NUM_PLACES)

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    def came(self, plan_id: str, epoch: int, places: Int64Array, dealing: Dealing, rank: int, ids: Int64Array) -> None:
        """Fact: these samples came for places ``(n,)`` of a rank."""
        positions = dealing.positions(rank, places)
        hashes = sample_hashes(plan_id, epoch, positions, ids)
        hashes[:, positions >= dealing.num_positions] = 0  # a repeat
        here, at = np.asarray(self._shared), places % self.NUM_PLACES
        here[0, at] = 0
        here[1:, at] = hashes.view(np.int64)
        here[0, at] = _name(epoch, places)

    def of(self, epoch: int, first: int, end: int) -> tuple[Int64Array, int]:
        """``(places, digest)``: those of the places ``[first, end)`` that are known, and the sum over these."""
        places = np.arange(first, end)
        here, at = np.asarray(self._shared), places % self.NUM_PLACES
        known = here[0, at] == _name(epoch, places)
        return places[known], sum_of_hashes(here[1:, at[known]].view(np.uint64))


class LoopDigests:
    """What the loop of a rank has had of its last epochs."""

    def __init__(self) -> None:
        self._had: dict[tuple[int, Dealing, int], tuple[PositionSet | tuple[()], int]] = {}
        self._before: dict[int, list[DigestPart]] = {}
        """Of the epoch that a state is of: what lies in it."""
        self.of_left: list[tuple[int, DigestPart]] = []
        """What lies in it of the epoch that loops had left by then."""

    def __bool__(self) -> bool:
        return bool(self._had or self._before or self.of_left)

    def goes_on_from(self, epoch: int, parts: Sequence[DigestPart], dealing: Dealing, rank: int) -> None:
        """Fact: the loop goes on from a state of an epoch, which holds these."""
        self._had.clear()
        name = dealing.num_ranks, dealing.batch, dealing.start, dealing.drop_last, rank
        self._before = {epoch: [part for part in parts if part.dealt != name]}
        for part in parts:
            if part.dealt == name:
                self._had[epoch, dealing, rank] = PositionSet(part.spans), part.digest

    def left(self, epoch: int, parts: Sequence[DigestPart]) -> None:
        """Fact: the loop goes on from a state that holds these of an epoch, to which it does not come back."""
        self.of_left = [(epoch, part) for part in parts]

    def has(self, epoch: int, dealing: Dealing, rank: int, first: int, end: int, received: ReceivedHashes) -> None:
        """Fact: the loop was given the rank's places ``[first, end)``. What it had before counts once."""
        before, digest = self._had.get((epoch, dealing, rank), ((), 0))
        spans = PositionSet(before)  # a copy: another thread may report what there was
        while (missing := spans.first_missing(first, end)) is not None:
            known, more = received.of(epoch, *missing)
            spans.add_all(known)
            digest += more
            first = missing[1]
        self._had[epoch, dealing, rank] = spans, digest
        kept = sorted({each for each, _, _ in self._had})[-_KEPT_EPOCHS:]
        self._had = {name: found for name, found in self._had.items() if name[0] in kept}
        self._before = {each: parts for each, parts in self._before.items() if each + _KEPT_EPOCHS > epoch}
        self.of_left = [(each, part) for each, part in self.of_left if each + _KEPT_EPOCHS > epoch]

    @property
    def epochs(self) -> list[int]:
        return sorted({epoch for epoch, _, _ in self._had} | {epoch for epoch, parts in self._before.items() if parts})

    def parts(self, epoch: int) -> list[DigestPart]:
        found = list(self._before.get(epoch, ()))
        for (of, dealing, rank), (spans, digest) in list(self._had.items()):
            if of == epoch:
                name = dealing.num_ranks, dealing.batch, dealing.start, dealing.drop_last
                found.append(DigestPart(*name, rank, tuple(spans), digest))
        return [*found, *(part for of, part in self.of_left if of == epoch and part not in found)]


def _name(epoch: int, places: Int64Array) -> Int64Array:
    """Of a position, never 0."""
    return (epoch % _EPOCHS) * _MOST_POSITIONS + places % _MOST_POSITIONS + 1
