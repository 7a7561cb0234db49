"""How are pods lost? Killed, one or all, ended in order, stopped for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.kinds.kind import Kind, a_pod, nobody, of_planned
from tests.chaos.schedule import Fault

if TYPE_CHECKING:
    from tests.chaos.chaos_run import ChaosRun


def _kill(run: ChaosRun, fault: Fault) -> bool:
    pod = fault.target[0]
    if not run.take_down(pod):
        return False
    run.cluster.kill(pod)
    run.start_later(fault, pod)
    return True


def _kill_all(run: ChaosRun, fault: Fault) -> bool:
    """Those that are paused, too: they are killed as they stand."""
    if run.down:
        return False
    for pod in range(run.cluster.num_pods):
        run.take_down(pod)
        run.cluster.kill(pod)
        run.start_later(fault, pod)
    return True


def _end(run: ChaosRun, fault: Fault) -> bool:
    pod = fault.target[0]
    if not run.take_down(pod):
        return False
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
    Kind("kill pod", "a pod is killed, and started again", of_planned(3), _kill, a_pod),
    Kind(
        "kill all pods",
        "all pods are killed at once, and started again",
        of_planned(4),
        _kill_all,
        nobody,
        theme="memory",
        most=2,
    ),
    Kind("end pod", "a pod ends in order, and is started again", of_planned(1), _end, a_pod),
    Kind("pause pod", "a pod stands still (SIGSTOP), and goes on", lambda _: 2, _pause, a_pod),
]
