"""How are pods lost? Killed with their journals or without, one or all, ended in order, stopped for a while."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from tests.chaos.kinds.kind import Kind, a_pod, nobody
from tests.chaos.schedule import Fault

if TYPE_CHECKING:
    from tests.chaos.chaos_run import ChaosRun


def _kill(run: ChaosRun, fault: Fault) -> bool:
    pod = fault.target[0]
    if not run.take_down(pod):
        return False
    run.cluster.kill(pod)
    if run.setting.volumes == "none":
        run.lost("memory")
    run.start_later(fault, pod)
    return True


def _lose(run: ChaosRun, fault: Fault) -> bool:
    pod = fault.target[0]
    if not run.take_down(pod):
        return False
    run.cluster.kill(pod)
    shutil.rmtree(run.journal_of(pod), ignore_errors=True)
    run.lost("memory")
    run.start_later(fault, pod)
    return True


def _lose_all(run: ChaosRun, fault: Fault) -> bool:
    """Those that are paused, too: they are killed as they stand."""
    if run.down:
        return False
    for pod in range(run.cluster.num_pods):
        run.take_down(pod)
        run.cluster.kill(pod)
        shutil.rmtree(run.journal_of(pod), ignore_errors=True)
        run.start_later(fault, pod)
    run.lost("memory")
    return True


def _end(run: ChaosRun, fault: Fault) -> bool:
    pod = fault.target[0]
    if not run.take_down(pod):
        return False
    run.ends_in_order()
    run.cluster.end_pod(pod)
    run.start_later(fault, pod)
    return True


def _pause(run: ChaosRun, fault: Fault) -> bool:
    pod = fault.target[0]
    if not run.take_down(pod):
        return False
    run.cluster.pause(pod)

    def go_on() -> None:
        run.cluster.resume(pod)
        run.down.discard(pod)

    run.then(fault, f"pod {pod} goes on", go_on)
    return True


KINDS = [
    Kind("kill pod", "a pod is killed, and started again; with its journal, if it has one", lambda _: 3, _kill, a_pod),
    Kind("lose pod", "so it is, and its journal is gone", lambda of: 3 * (of.volumes == "mixed"), _lose, a_pod),
    Kind(
        "lose all pods",
        "all pods are killed at once, and their journals are gone",
        lambda _: 4,
        _lose_all,
        nobody,
        theme="memory",
        most=2,
    ),
    Kind("end pod", "a pod ends in order, and is started again", lambda _: 1, _end, a_pod),
    Kind("pause pod", "a pod stands still (SIGSTOP), and goes on", lambda _: 2, _pause, a_pod),
]
