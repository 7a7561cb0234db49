"""What becomes of jobs that share the reads of the store? One begins late, lags far behind, loses ranks, or is ended
in the middle; the others must not notice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.chaos.kinds.kind import Kind
from tests.chaos.schedule import Fault, Setting

if TYPE_CHECKING:
    from tests.chaos.beside import JobBeside
    from tests.chaos.chaos_run import ChaosRun

_LATE_PACE = 0.5
"""A job that begins late comes near the others again."""


def _taken(run: ChaosRun, number: int) -> JobBeside | None:
    job = run.beside[number]
    return job if job.take() else None


def _begin_late(run: ChaosRun, fault: Fault) -> bool:
    run.begin_beside(_LATE_PACE)
    return True


def _end(run: ChaosRun, fault: Fault) -> bool:
    """Its ranks are gone, and pods still read ahead for it."""
    if (job := _taken(run, fault.target[0])) is None:
        return False
    job.kill()
    job.is_over = True
    run.end_at_pods(job)
    return True


def _kill(run: ChaosRun, fault: Fault) -> bool:
    if (job := _taken(run, fault.target[0])) is None:
        return False
    job.kill()

    def start() -> None:
        job.restart()
        job.give_back()

    run.then(fault, f"ranks of {job.name} start again", start)
    return True


def _kill_rank(run: ChaosRun, fault: Fault) -> bool:
    number, rank = fault.target
    if (job := _taken(run, number)) is None:
        return False
    job.kill_rank(rank % len(job.legs.ranks))
    job.give_back()
    return True


def _pause(run: ChaosRun, fault: Fault) -> bool:
    if (job := _taken(run, fault.target[0])) is None:
        return False
    for process in job.legs.ranks:
        process.pause()

    def go_on() -> None:
        for process in job.legs.ranks:
            process.resume()
        job.give_back()

    run.then(fault, f"ranks of {job.name} go on", go_on)
    return True


def _a_job(setting: Setting, chooser: random.Random) -> tuple[int, ...]:
    return (chooser.randrange(setting.beside),)


def _a_rank(setting: Setting, chooser: random.Random) -> tuple[int, ...]:
    return chooser.randrange(setting.beside), chooser.randrange(2)


def _weight(weight: int) -> Callable[[Setting], int]:
    return lambda of: weight * bool(of.beside)


KINDS = [
    Kind(
        "kill rank beside",
        "a rank of another job of the sweep is killed, and goes on from what it had written down",
        _weight(3),
        _kill_rank,
        _a_rank,
        theme="sweep",
        lasts=(0.0, 0.0),
    ),
    Kind(
        "kill job beside",
        "all ranks of another job of the sweep are killed, and go on later from the states that they saved",
        _weight(3),
        _kill,
        _a_job,
        theme="sweep",
        lasts=(0.2, 3.0),
    ),
    Kind(
        "pause job beside",
        "all ranks of another job of the sweep stand still, and go on far behind",
        _weight(3),
        _pause,
        _a_job,
        theme="sweep",
        lasts=(0.5, 4.0),
    ),
    Kind(
        "end job beside",
        "another job of the sweep is ended in the middle, while pods read ahead for it",
        _weight(2),
        _end,
        _a_job,
        theme="sweep",
        lasts=(0.0, 0.0),
        most=1,
    ),
    Kind(
        "late job",
        "two or three jobs with one read_seed run side by side, and one more begins, faster than they are",
        _weight(4),
        _begin_late,
        theme="sweep",
        lasts=(0.0, 0.0),
        most=1,
    ),
]
