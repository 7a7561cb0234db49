"""Which processes are a job's ranks, from its beginning or from where it was resumed, and how far have they come?"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.chaos.planned_truth import Leg
from tests.chaos.rank import Begun, RankPlan, read_answers, read_begun
from tests.chaos.rank_process import RankProcess

from refill.pods.resume_state import ResumeState
from refill.protocol.dealing import Dealing
from refill.protocol.job_spec import JobSpec

__all__ = ["Checkpoint", "Legs"]

_EARLIER_BATCHES = 3
"""A checkpoint is so many batches old, at most."""


@dataclass(frozen=True)
class Checkpoint:
    incarnation: str
    epoch: int
    position: int
    leg: int
    """The number of the leg that saved it."""
    state: dict[str, Any] | None = None
    """As a loop saves it."""


class Legs:
    """The ranks that there are, and the files of those before.

    :param plan_of: the plan of a rank, by ``(leg, rank, number of ranks)``.
    :param num_positions: of each epoch.
    """

    def __init__(
        self, plan_of: Callable[[int, int, int], RankPlan], seed: int, num_positions: int, *, drop_last: bool = False
    ) -> None:
        self._plan_of = plan_of
        self._drop_last = drop_last
        self._num_positions = num_positions
        self._chooser = random.Random(f"checkpoints {seed}")
        self._checkpoints: list[Checkpoint | None] = []
        self._files: list[list[Path]] = []
        self.ranks: list[RankProcess] = []

    def begin(self, num_ranks: int, checkpoint: Checkpoint | None = None) -> None:
        leg = len(self._files)
        plans = [self._plan_of(leg, rank, num_ranks) for rank in range(num_ranks)]
        if checkpoint is not None and checkpoint.state is not None:
            plans = [replace(plan, state=checkpoint.state) for plan in plans]
        self._checkpoints.append(checkpoint)
        self._files.append([Path(plan.file) for plan in plans])
        self.ranks = []
        for plan in plans:
            self.ranks.append(RankProcess(plan))

    @property
    def files(self) -> list[Path]:
        """Of the ranks that there are now."""
        return self._files[-1]

    @property
    def plan(self) -> dict[str, Any] | None:
        """Of a planned job: by which plan these ranks go."""
        begun = [read_begun(str(path)) for path in self._files[-1]]
        return next((each.plan for each in begun if each is not None), None)

    def stop(self) -> None:
        """Kill all of them."""
        for process in self.ranks:
            process.kill()

    @property
    def have_saved(self) -> bool:
        """Whether any of them goes on from a state when it is started again."""
        saved = (Path(f"{process.plan.file}.state").exists() for process in self.ranks)
        return self._checkpoints[-1] is not None or any(saved)

    def goes_on_without(self, rank: int) -> bool:
        """Whether somebody knows by which plan samples have come though this rank is lost, and pods, too: it has saved
        a state, or another one has had samples."""
        others = [process for process in self.ranks if process is not self.ranks[rank]]
        return self.have_saved or any(read_begun(process.plan.file) is not None for process in others)

    @property
    def have_begun(self) -> bool:
        """Whether each has received something since it was started last, or has ended."""
        return all(process.failure or process.has_received for process in self.ranks)

    def bytes_written(self) -> int:
        """Grows with whatever a rank of the newest leg receives that is not done: those go on asking."""
        files = [Path(process.plan.file) for process in self.ranks if not process.done]
        return sum(path.stat().st_size for path in files if path.exists())

    def epochs(self) -> tuple[int, int]:
        """The first and the last epoch that ranks are in."""
        newest = [max((answer.epoch for answer in read_answers(path)), default=0) for path in self._files[-1]]
        return min(newest), max(newest)

    def checkpoint(self) -> Checkpoint | None:
        """One that all ranks have come to, a few batches ago; None when not all have begun."""
        begun = [read_begun(process.plan.file) for process in self.ranks]
        if None in begun or (first := begun[0]) is None:
            return None
        places = []
        for path in self._files[-1]:
            positions = defaultdict[int, set[int]](set)
            for answer in read_answers(path):
                positions[answer.epoch] |= {*answer.positions}
            newest = max(positions, default=first.epoch)
            place = first.start if newest == first.epoch else 0
            while place in positions[newest]:
                place += 1
            places.append((newest, place))
        epoch, position = min(places)
        start = first.start if epoch == first.epoch else 0
        batch = self.ranks[0].plan.batch
        earlier = max(start, position - batch * self._chooser.randrange(_EARLIER_BATCHES))
        earlier -= (earlier - start) % batch
        whole = Dealing(self._num_positions, len(self.ranks), drop_last=self._drop_last)
        length = first.length if epoch == first.epoch else whole.per_rank
        if earlier >= length:
            epoch, earlier, length = epoch + 1, 0, whole.per_rank
        return Checkpoint(
            first.incarnation, epoch, earlier, len(self._files) - 1, self._state(first, epoch, earlier, length)
        )

    def _state(self, first: Begun, epoch: int, position: int, length: int) -> dict[str, Any] | None:
        """As rank 0 saves it, where the order is planned."""
        if first.plan is None:
            return None
        plan = self.ranks[0].plan
        spec = JobSpec.from_dict(plan.spec)
        return ResumeState(
            spec.name,
            spec.dataset,
            first.incarnation,
            len(self.ranks),
            0,
            epoch,
            position,
            length,
            plan=first.plan,
            start=first.dealt_from if epoch == first.epoch else 0,
            batch=1 if spec.is_listed else plan.batch,
        ).to_dict()

    def leg(self) -> Leg:
        """The ranks that there are now, with those before from whose checkpoints they went on."""
        return self._leg(len(self._files) - 1)

    def _leg(self, number: int) -> Leg:
        files, checkpoint = self._files[number], self._checkpoints[number]
        if checkpoint is None:
            return Leg(files)
        begun = read_begun(str(files[0]))
        assert begun is not None, "a leg goes on from a checkpoint, and has not begun"
        return Leg(files, begun.epoch, begun.start, self._leg(checkpoint.leg), begun.dealt_from, checkpoint.position)
