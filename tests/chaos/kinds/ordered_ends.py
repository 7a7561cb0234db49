"""What becomes of a job when pods end in order? One after another, or all, or replaced by another number."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.chaos.kinds.kind import Kind, of_planned
from tests.chaos.schedule import Fault, Setting

if TYPE_CHECKING:
    from tests.chaos.chaos_run import ChaosRun

_PAUSE_SECONDS = 0.3


def _roll(run: ChaosRun, fault: Fault) -> bool:
    """As a StatefulSet is updated: the next pod ends when the one before is ready again."""
    with_ranks = not fault.target[0]
    if run.down or (not with_ranks and run.ranks_down):
        return False
    num_pods = run.cluster.num_pods
    run.down |= set(range(num_pods))
    homes = [process.plan.home for process in run.ranks]
    if not with_ranks:
        run.stop_ranks()

    def replace(pod: int) -> None:
        run.cluster.end_pod(pod)
        run.cluster.restart(pod)
        run.has_started(pod)
        if pod:
            run.then(fault, f"pod {pod - 1} ends in order", lambda: replace(pod - 1))
        elif not with_ranks:
            run.then(fault, "ranks start again", lambda: run.restart_ranks(homes))

    run.then(fault, f"pod {num_pods - 1} ends in order", lambda: replace(num_pods - 1))
    return True


def _end_all(run: ChaosRun, fault: Fault) -> bool:
    """One after another, and all are away for a while; ranks live on."""
    return _replace_all(run, fault, run.cluster.num_pods)


def _scale(run: ChaosRun, fault: Fault) -> bool:
    if fault.target[0] == run.cluster.num_pods:
        return False
    return _replace_all(run, fault, fault.target[0])


def _replace_all(run: ChaosRun, fault: Fault, num_pods: int) -> bool:
    if run.down:
        return False
    run.down |= set(range(run.setting.pods))
    run.cluster.end()

    def start() -> None:
        run.cluster.start(num_pods)
        run.has_started(*run.down)

    run.then(fault, f"{num_pods} pods start", start)
    return True


def _without_ranks(setting: Setting, chooser: random.Random) -> tuple[int, ...]:
    return (chooser.choice((0, 0, 1)) if "twins" not in setting.themes else 0,)


KINDS = [
    Kind(
        "roll pods",
        "pods end in order one after another, each started again before the next one ends; 1: while no rank is alive",
        of_planned(4),
        _roll,
        _without_ranks,
        theme="ends",
        lasts=(_PAUSE_SECONDS, 1.0),
        most=2,
    ),
    Kind(
        "end all pods",
        "pods end in order one after another, and start together",
        of_planned(4),
        _end_all,
        theme="ends",
        most=2,
    ),
    Kind(
        "scale",
        "all pods end in order, and two or three start in their place",
        of_planned(10),
        _scale,
        lambda _, chooser: (chooser.choice((2, 3)),),
        theme="scaling",
    ),
]
