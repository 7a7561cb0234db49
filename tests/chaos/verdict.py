"""What is to be said of a run: exact, lost and told so, refused by name, or wrong?"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.chaos.ground_truth import GroundTruth
from tests.chaos.planned_truth import PlannedTruth

__all__ = ["Verdict"]

_SHOWN = 5
_SHOWN_OF_LOG = 10_000
"""Characters."""
_LOST = re.compile(r"^rank \d+: JobLost: job \S+ .*\S")


@dataclass
class Verdict:
    problems: list[str] = field(default_factory=list)
    refused: str = ""
    """The line with which a rank of a planned job ended."""
    times_lost: int = 0
    """How often a live job was lost, as all its ranks were told."""
    receipts: int = 0

    def __str__(self) -> str:
        if self.problems:
            return "FAILED"
        if self.refused:
            return f"refused ({self.refused})"
        return "exact" + f", after it was lost {self.times_lost} times" * bool(self.times_lost)

    def pods_said(self, logs: Sequence[str]) -> None:
        """Fact: what pods have logged. Whatever is done to them, nothing is an error that they did not foresee."""
        for pod, log in enumerate(logs):
            _, traceback, after = log.partition("Traceback")
            if traceback:
                self.problems.append(f"pod {pod} has failed: {traceback}{after[:_SHOWN_OF_LOG]}")

    def rank_ended(self, lines: str, *, registered_apart: bool) -> None:
        """Fact: a rank ended by itself, with these last lines of its log. It may where ranks of a planned job
        registered at pods that did not reach each other, and it says that it is refused since another plan stands."""
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

    def job_was_lost(self, of_ranks: Sequence[str], truth: GroundTruth, epochs: int) -> None:
        """Fact: pods have lost their memory, and with these last lines of their logs all ranks of a live job ended.
        Until then nothing may have come twice, or otherwise than before."""
        self.times_lost += 1
        for lines in of_ranks:
            if "Traceback" in lines or _LOST.match(lines.splitlines()[-1]) is None:
                self.problems.append(f"the job was lost, and a rank says: {lines}")
        self.problems += truth.wrong[:_SHOWN]
        self.problems += [problem for epoch in range(epochs) for problem in truth.twice_in(epoch)]

    def judge_live(self, truth: GroundTruth, epochs: int, receipt_of: Callable[[int], httpx.Response]) -> None:
        """Hold what ranks received, and what the pods say of it, against what may be."""
        self.problems += truth.wrong[:_SHOWN]
        for epoch in range(epochs):
            self.problems += truth.problems_of(epoch)
            if (receipt := self._receipt(f"epoch {epoch}", receipt_of(epoch))) is not None and (
                not receipt["exact"] or any(receipt[what] for what in ("duplicates", "missing"))
            ):
                self.problems.append(f"the receipt of epoch {epoch} says: {receipt}")

    def judge_planned(
        self,
        truth: PlannedTruth,
        epochs: int,
        receipt_of: Callable[[int], httpx.Response],
        *,
        may_lack: bool,
        is_listed: bool = False,
    ) -> None:
        """All is exact, whatever was lost.

        :param may_lack: whether receipts may have been lost, but for the last epoch's.
        :param is_listed: whether ranks ask by lists: those of earlier epochs may have been lost, too.
        """
        self.problems += truth.damaged[:_SHOWN]
        for epoch in range(epochs):
            self.problems += truth.problems_of(epoch)
            may_lack_this = may_lack and epoch + 1 < epochs
            answer = receipt_of(epoch)
            if answer.status_code in (404, 410) and may_lack_this:
                continue
            if (receipt := self._receipt(f"epoch {epoch}", answer)) is None:
                continue
            says = receipt["exact"], receipt["planned"], receipt["damaged"]
            if is_listed and may_lack_this:
                says = receipt["exact"], truth.planned_in(epoch), receipt["damaged"]
            is_right = says in ((True, truth.planned_in(epoch), 0), (not may_lack_this, truth.planned_in(epoch), 0))
            confirms_all = (
                receipt["unconfirmed"] == 0 and receipt.get("lists", receipt["world_size"]) == receipt["world_size"]
            )
            if not is_right or receipt["exact"] is not confirms_all:
                self.problems.append(f"the receipt of epoch {epoch} says: {receipt}")

    def judge_mixture(
        self,
        truth: PlannedTruth,
        epochs: int,
        passes: Mapping[tuple[str, int], tuple[int, int]],
        receipt_of: Callable[[str, int, int], httpx.Response],
        *,
        may_lack: bool,
    ) -> None:
        """As a planned job; and the receipt of each pass over a dataset says what came of it, and never more.

        :param passes: by dataset and number: samples of the pass, and how many of them came.
        :param receipt_of: of a pass of which so many came.
        """
        self.problems += truth.damaged[:_SHOWN]
        for epoch in range(epochs):
            self.problems += truth.problems_of(epoch)
        for (dataset, number), (size, came) in passes.items():
            answer = receipt_of(dataset, number, came)
            if (answer.status_code in (404, 410) and may_lack) or (
                receipt := self._receipt(f"pass {number} of {dataset}", answer)
            ) is None:
                continue
            received = receipt["received"]
            is_right = received == came or (may_lack and received < came)
            says = receipt["planned"], receipt["damaged"], receipt["exact"]
            if not is_right or says != (size, 0, received == size):
                self.problems.append(
                    f"{came} of {size} samples came in pass {number} of {dataset}, and it says: {receipt}"
                )

    def _receipt(self, what: str, answer: httpx.Response) -> dict[str, Any] | None:
        if answer.status_code != 200:
            self.problems.append(f"{what} has no receipt: {answer.status_code} {answer.text[:300]}")
            return None
        self.receipts += 1
        found: dict[str, Any] = answer.json()
        return found
