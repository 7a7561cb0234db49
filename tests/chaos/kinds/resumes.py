"""What becomes of a planned job whose ranks all end, and that goes on from a checkpoint, perhaps with others?"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.chaos.kinds.kind import Kind, of_planned
from tests.chaos.schedule import Fault, Setting

if TYPE_CHECKING:
    from tests.chaos.chaos_run import ChaosRun


def _resume(run: ChaosRun, fault: Fault) -> bool:
    """Target: the number of ranks; then of a second time, from the same checkpoint, 0: there is none."""
    num_ranks, again = fault.target
    checkpoint = None if run.ranks_down else run.checkpoint()
    if checkpoint is None:
        return False
    run.stop_ranks()
    run.begin_leg(num_ranks, checkpoint)
    if again:
        run.ranks_down = set(range(num_ranks))  # nobody else stops them

        def once_more() -> None:
            run.stop_ranks()
            run.begin_leg(again, checkpoint)

        run.then(fault, f"these ranks are killed, and {again} resume from the same checkpoint", once_more)
    return True


def _numbers(setting: Setting, chooser: random.Random) -> tuple[int, ...]:
    return chooser.choice((1, 2, 3, 4)), chooser.choice((0, 1, 2, 3, 4))


KINDS = [
    Kind(
        "resume",
        "all ranks are killed, and others resume from a checkpoint; some die before they save one, and yet others "
        "resume from the same",
        of_planned(6),
        _resume,
        _numbers,
        theme="resumes",
        lasts=(0.5, 3.0),
        most=2,
    ),
]
