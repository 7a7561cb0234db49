"""What becomes of a live job when pods lose their memory? All its ranks are told, and a fresh start is exact."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.chaos.kinds.kind import Kind
from tests.chaos.schedule import Fault, Setting

if TYPE_CHECKING:
    from tests.chaos.chaos_run import ChaosRun


def _lose(run: ChaosRun, fault: Fault) -> bool:
    """Target: a pod, whether it ends in order, and whether all others are killed with it."""
    pod, in_order, with_others = fault.target
    if run.down or run.job_is_lost or not run.ranks_have_begun:  # one that has received nothing loses nothing
        if not run.is_over:
            run.then(fault, f"again: {fault}", lambda: run.begin(fault))
        return False
    run.loses_job()
    for each in range(run.cluster.num_pods) if with_others else [pod]:
        run.take_down(each)
        if in_order:
            run.cluster.end_pod(each)
        else:
            run.cluster.kill(each)
        run.start_later(fault, each)
    return True


def _target(setting: Setting, chooser: random.Random) -> tuple[int, ...]:
    return chooser.randrange(setting.pods), chooser.randrange(2), chooser.choice((0, 0, 1))


KINDS = [
    Kind(
        "lose job",
        "a pod is killed, and started again; 1: it ends in order; 1: so do all others. Every rank is told that the job "
        "is lost, and starts anew",
        lambda of: 12 * (not of.is_planned),
        _lose,
        _target,
        theme="lost",
        most=2,
    )
]
