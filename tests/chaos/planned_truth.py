"""Was every position of a planned job answered with the sample that its plan has there, and each sample given once?

Judged from what ranks wrote down and from the plan, which is a function: whatever was lost, there is one right answer.
A job that was resumed has several *legs*: see :class:`Leg`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.chaos.epoch_orders import EpochOrder
from tests.chaos.rank import read_answers

from refill.protocol.dealing import Dealing
from refill.protocol.wire_format import Int64Array

__all__ = ["Leg", "PlannedTruth", "plan_ids_of", "wrong_bytes_of"]

_SHOWN = 5


@dataclass(frozen=True)
class Leg:
    """The ranks of a job from one resume to the next, and where they began. What a leg received after the checkpoint
    from which the next one went on was consumed by nobody, and comes again."""

    files: Sequence[Path]
    """By rank."""
    epoch: int = 0
    position: int = 0
    """The first one of each rank, as this leg counts them."""
    before: Leg | None = None
    """The leg that saved the checkpoint."""
    dealt_from: int = 0
    """From which position of the epoch's one order on ``epoch`` is dealt."""
    saved_at: int = 0
    """The position, as the ranks of the leg before count them, at which the checkpoint was saved."""


class PlannedTruth:
    """What the ranks of one job received.

    :param leg: the last one.
    :param checksums: crc32 of the bytes of each sample, by its id.
    :param order: the sample of each position of an epoch, as it should be.
    :param batch: positions that are dealt to a rank together.
    """

    def __init__(self, leg: Leg, checksums: Sequence[int], order: EpochOrder, batch: int, *, drop_last: bool) -> None:
        self.asked_again = 0
        self.deliveries = 0
        self._damaged: list[str] = []
        self._leg, self._checksums, self.order = leg, checksums, order
        self._batch, self._drop_last = batch, drop_last
        self._orders: dict[int, Int64Array] = {}
        self._answered: dict[int, dict[tuple[int, int, int], int]] = {}
        """Of each leg by its identity: samples by epoch, rank and position of the rank."""
        each: Leg | None = leg
        while each is not None:
            self._answered[id(each)] = {}
            for rank, path in enumerate(each.files):
                self._read(each, rank, path)
            each = each.before

    @property
    def damaged(self) -> list[str]:
        """Whatever epoch they are of."""
        return [*self.order.damaged, *self._damaged]

    def planned_in(self, epoch: int) -> int:
        """How many positions are dealt, repeats not counted."""
        dealing = self._dealing(self._leg, epoch)
        each = self._leg
        while epoch < each.epoch and each.before is not None:
            each = each.before
            dealing = self._dealing(each, epoch)
        return min(dealing.num_positions, dealing.start + dealing.per_rank * dealing.num_ranks)

    def problems_of(self, epoch: int) -> list[str]:
        """In words, empty when the epoch gave every sample exactly once, or as often as its order has it."""
        counts: Counter[int] = Counter()
        given: Counter[int] = Counter()
        unanswered = 0
        for leg, rank, positions in self._consumed(epoch):
            dealing, answered = self._dealing(leg, epoch), self._answered[id(leg)]
            places = dealing.positions(rank, positions)
            for position, place in zip(positions.tolist(), places.tolist(), strict=True):
                sample = answered.get((epoch, rank, position))
                unanswered += sample is None
                if place < dealing.num_positions:
                    counts[place] += 1
                    if sample is not None:
                        given[sample] += 1
        planned = self.planned_in(epoch)
        problems = [f"epoch {epoch}: {unanswered} positions without an answer"] * bool(unanswered)
        if sorted(counts) != list(range(planned)) or set(counts.values()) - {1}:
            problems.append(f"epoch {epoch}: of {planned} positions, {len(counts)} were dealt, {counts.total()} times")
        expected = Counter(self._order(epoch)[:planned].tolist())
        for what, samples in (("came too often", given - expected), ("did not come", expected - given)):
            if samples:
                problems.append(f"epoch {epoch}: {len(samples)} samples that {what}: {sorted(samples)[:_SHOWN]}")
        return problems

    def _consumed(self, epoch: int) -> Iterator[tuple[Leg, int, Int64Array]]:
        """What loops have trained with and went on from, of each leg: ``(leg, rank, positions)``."""
        leg, until = self._leg, None  # the first place that comes after it in the next leg
        while True:
            length = self._dealing(leg, epoch).per_rank
            first = 0 if epoch > leg.epoch else leg.position if epoch == leg.epoch else length
            end = length
            if until is not None:
                end = 0 if epoch > until[0] else until[1] if epoch == until[0] else length
            for rank in range(len(leg.files)):
                if first < end:
                    yield leg, rank, np.arange(first, end)
            if leg.before is None:
                return
            until = leg.epoch, leg.saved_at
            leg = leg.before

    def _read(self, leg: Leg, rank: int, path: Path) -> None:
        answered = self._answered[id(leg)]
        for answer in read_answers(path):
            dealing, order = self._dealing(leg, answer.epoch), self._order(answer.epoch)
            places = dealing.positions(rank, np.array(answer.positions)) % dealing.num_positions
            for position, sample, checksum, right in zip(
                answer.positions, answer.samples, answer.checksums, order[places].tolist(), strict=True
            ):
                self.deliveries += 1
                where = f"epoch {answer.epoch}, rank {rank}, position {position}"
                if sample != right:
                    self._damaged.append(
                        f"{where}: sample {sample}, and the plan has {right} (plan {answer.plan_id:.8})"
                    )
                elif checksum != self._checksums[sample]:
                    self._damaged.append(f"{where}: the bytes of sample {sample} are wrong")
                self.asked_again += (answer.epoch, rank, position) in answered
                answered[answer.epoch, rank, position] = sample

    def _dealing(self, leg: Leg, epoch: int) -> Dealing:
        start = leg.dealt_from if epoch == leg.epoch else 0
        return Dealing(len(self._order(epoch)), len(leg.files), self._batch, start, self._drop_last)

    def _order(self, epoch: int) -> Int64Array:
        if epoch not in self._orders:
            self._orders[epoch] = self.order(epoch)
        return self._orders[epoch]


def plan_ids_of(paths: list[Path]) -> dict[str, list[str]]:
    """By which plans samples came: names of the files of ranks, by plan."""
    found: dict[str, list[str]] = {}
    for path in paths:
        for plan_id in {answer.plan_id for answer in read_answers(path)}:
            found.setdefault(plan_id, []).append(path.name)
    return found


def wrong_bytes_of(paths: list[Path], checksums: list[int], plan: str | None = None) -> list[str]:
    """Of answers whose order is not looked at; of those by one plan, if it is named."""
    return [
        f"{path.name}, epoch {answer.epoch}: the bytes of sample {sample} are wrong"
        for path in paths
        for answer in read_answers(path)
        if plan in (None, answer.plan_id)
        for sample, checksum in zip(answer.samples, answer.checksums, strict=True)
        if checksum != checksums[sample]
    ][:_SHOWN]
