"""What does a pod do that stood still, was given up, and wakes beside its successor?"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from tests.chaos.kinds.kind import Kind, a_pod
from tests.chaos.schedule import Fault

if TYPE_CHECKING:
    from tests.chaos.chaos_run import ChaosRun


def _replace(run: ChaosRun, fault: Fault) -> bool:
    """One at a time: two that wake and reach each other only are two halves of a cut network. And only one that has
    started: one that wakes and begins to start then is the later run, and ends its successor, which nobody starts again
    here.
    """
    pod = fault.target[0]
    if any(zombie.poll() is None for zombie in run.zombies) or not run.is_up(pod) or not run.take_down(pod):
        return False
    run.cluster.pause(pod)
    if run.journal_of(pod).exists():
        # As on a volume that knows no locks: each of the two has a lock of its own, and all else is the same.
        (run.journal_of(pod) / "lock").unlink()
    else:
        run.lost("memory")
    zombie = run.replace(pod)

    def wake() -> None:
        zombie.send_signal(signal.SIGCONT)
        run.down.discard(pod)

    run.then(fault, f"the earlier process of pod {pod} wakes", wake)
    return True


KINDS = [
    Kind(
        "zombie pod",
        "a pod stands still, its successor starts elsewhere under its name, and it wakes beside it",
        lambda of: 4 * (of.pods > 1),
        _replace,
        a_pod,
        theme="zombies",
        lasts=(0.2, 3.0),
        most=3,
    )
]
