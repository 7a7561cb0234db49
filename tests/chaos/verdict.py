"""What is to be said of a run: exact, unknown where pods say so, refused by name, or wrong?

A *loss* is something that somebody knew: a pod's memory without a whole journal, a rank's record of what it has
received, or who owned what (the number of pods changed). One of them alone must leave the job exact. A record and
another one, in the same epochs, may make deliveries unknown, or end the job. Never may anything be wrong that a receipt
calls exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.chaos.ground_truth import GroundTruth
from tests.chaos.planned_truth import PlannedTruth

__all__ = ["Loss", "Verdict"]

_SHOWN = 5
_REFUSALS = re.compile(r"^rank \d+: (JobLost|EpochEnded): \S")


@dataclass(frozen=True)
class Loss:
    what: str
    """``memory``, ``record`` or ``owners``."""
    first_epoch: int
    last_epoch: int
    """Where ranks were then."""

    def meets(self, other: Loss) -> bool:
        """Whether both can concern one epoch. Pods keep the one before the running one."""
        return self.first_epoch <= other.last_epoch + 1 and other.first_epoch <= self.last_epoch + 1


@dataclass
class Verdict:
    problems: list[str] = field(default_factory=list)
    unknown_in: list[int] = field(default_factory=list)
    """Epochs of which the receipt says so."""
    refused: str = ""
    """The line with which a rank ended."""
    receipts: int = 0

    def __str__(self) -> str:
        if self.problems:
            return "FAILED"
        if self.refused:
            return f"refused ({self.refused})"
        return f"unknown in epochs {self.unknown_in}" if self.unknown_in else "exact"

    def rank_ended(self, lines: str, losses: Sequence[Loss]) -> None:
        """Fact: a rank ended by itself, with these last lines of its log."""
        last = lines.splitlines()[-1]
        if _may_be_lost(losses) and _REFUSALS.match(last) and "Traceback" not in lines:
            self.refused = last
        else:
            self.problems.append(f"a rank failed: {lines}")

    def planned_rank_ended(self, lines: str, *, registered_apart: bool) -> None:
        """Fact: a rank of a planned job ended by itself. It may where ranks registered at pods that did not reach each
        other, and it says that it is refused since another plan stands."""
        last = lines.splitlines()[-1]
        if registered_apart and "JobConflict" in last and "plan" in last and "Traceback" not in lines:
            self.refused = last
        else:
            self.problems.append(f"a rank failed: {lines}")

    def dataset_was_replaced(self, of_ranks: Sequence[str], url: str) -> None:
        """Fact: with these last lines of their logs all ranks ended, after the dataset was replaced."""
        self.refused = of_ranks[0].splitlines()[-1]
        for lines in of_ranks:
            last = lines.splitlines()[-1]
            if "Traceback" in lines or not re.match(r"rank \d+: \w+: .*(replaced|damaged)", last) or url not in last:
                self.problems.append(f"the dataset was replaced, and a rank says: {lines}")

    def judge(
        self,
        truth: GroundTruth,
        epochs: int,
        losses: Sequence[Loss],
        receipt_of: Callable[[int], httpx.Response],
        resumed_at: int,
    ) -> None:
        """Hold what ranks received, and what the pods say of it, against what may be.

        :param resumed_at: the epoch that the job was resumed in; 0: it was not.
        """
        self.problems += truth.damaged
        for epoch in range(epochs):
            may_be_forgotten = _may_be_unknown(losses, epoch)
            found, in_words = truth.of_epoch(epoch), truth.problems_of(epoch, may_be_forgotten=may_be_forgotten)
            answer = receipt_of(epoch)
            is_old = epoch + 1 < epochs and (bool(losses) or epoch < resumed_at)
            if answer.status_code in (400, 410) and is_old:
                # Not exact without a word would be hidden by a receipt that is gone; ranks and pods have logged it.
                if in_words and not may_be_forgotten:
                    self.problems += in_words
                continue
            if answer.status_code != 200:
                self.problems += [f"epoch {epoch} has no receipt: {answer.status_code} {answer.text[:300]}", *in_words]
                continue
            self.receipts += 1
            receipt: dict[str, Any] = answer.json()
            if receipt["unknown"] and not receipt["exact"] and may_be_forgotten and not found.unanswered:
                self.unknown_in.append(epoch)
                # What is left may be dealt with repeats, so that each rank gets as many: how many, pods alone know. And
                # a position that is asked for again, as no loop does, counts as answered then: what it had got before
                # is known to the rank alone.
                if found.in_doubt > receipt["unknown"] + receipt.get("repeats", 0) + found.changed:
                    self.problems += [f"the receipt says too little: {receipt}", *in_words]
            elif (
                in_words or not receipt["exact"] or any(receipt[what] for what in ("duplicates", "unknown", "missing"))
            ):
                self.problems += [f"the receipt of epoch {epoch} says: {receipt}", *in_words]

    def judge_planned(
        self,
        truth: PlannedTruth,
        epochs: int,
        losses: Sequence[Loss],
        receipt_of: Callable[[int], httpx.Response],
        *,
        is_listed: bool = False,
    ) -> None:
        """Of a planned job: all is exact, whatever was lost. Receipts may have been, but for the last epoch's.

        :param is_listed: whether ranks ask by lists: those of earlier epochs may have been lost, too.
        """
        self.problems += truth.damaged[:_SHOWN]
        for epoch in range(epochs):
            in_words = truth.problems_of(epoch)
            self.problems += in_words
            answer = receipt_of(epoch)
            if answer.status_code in (404, 410) and losses and epoch + 1 < epochs:
                continue
            if answer.status_code != 200:
                self.problems.append(f"epoch {epoch} has no receipt: {answer.status_code} {answer.text[:300]}")
                continue
            self.receipts += 1
            receipt: dict[str, Any] = answer.json()
            may_lack = bool(losses) and epoch + 1 < epochs
            says = receipt["exact"], receipt["planned"], receipt["damaged"]
            if is_listed and may_lack:
                says = receipt["exact"], truth.planned_in(epoch), receipt["damaged"]
            is_right = says in ((True, truth.planned_in(epoch), 0), (not may_lack, truth.planned_in(epoch), 0))
            confirms_all = (
                receipt["unconfirmed"] == 0 and receipt.get("lists", receipt["world_size"]) == receipt["world_size"]
            )
            if not is_right or receipt["exact"] is not confirms_all:
                self.problems.append(f"the receipt of epoch {epoch} says: {receipt}")


def _may_be_lost(losses: Sequence[Loss]) -> bool:
    records = [loss for loss in losses if loss.what == "record"]
    return any(record.meets(loss) for record in records for loss in losses if loss.what != "record")


def _may_be_unknown(losses: Sequence[Loss], epoch: int) -> bool:
    records = [loss for loss in losses if loss.what == "record"]
    return _may_be_lost(losses) and any(epoch <= record.last_epoch for record in records)
