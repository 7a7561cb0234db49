"""How are ranks lost? Killed and started again, or stopped for a while."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.chaos.kinds.kind import Kind, a_rank
from tests.chaos.schedule import Fault, Setting

if TYPE_CHECKING:
    from tests.chaos.chaos_run import ChaosRun


def _kill(run: ChaosRun, fault: Fault) -> bool:
    rank, home = fault.target
    # Of a dataset that was replaced, one that had saved no state would begin a run, and not be refused.
    if rank >= len(run.ranks) or rank in run.ranks_down or run.dataset_replaced or run.job_is_lost:
        return False
    run.ranks[rank].kill()
    run.rank_was_killed()
    run.restart_rank(rank, run.home_url(rank, home))
    return True


def _pause(run: ChaosRun, fault: Fault) -> bool:
    rank = fault.target[0]
    if rank >= len(run.ranks) or rank in run.ranks_down:
        return False
    process = run.ranks[rank]
    run.ranks_down.add(rank)
    process.pause()

    def resume() -> None:
        process.resume()
        run.ranks_down.discard(rank)

    run.then(fault, f"rank {rank} goes on", resume)
    return True


def _rank_and_home(setting: Setting, chooser: random.Random) -> tuple[int, ...]:
    rank = chooser.randrange(setting.ranks)
    moves = chooser.random() < 0.2 and "scaling" not in setting.themes
    return rank, chooser.randrange(setting.pods) if moves else setting.home_of(rank)


KINDS = [
    Kind(
        "kill rank",
        "a rank is killed, and goes on from what it had written down, maybe by way of another home pod",
        lambda of: 2 * ("twins" not in of.themes),  # a twin would take its place
        _kill,
        _rank_and_home,
        lasts=(0.0, 0.0),
    ),
    Kind("pause rank", "a rank stands still (SIGSTOP), and goes on", lambda _: 1, _pause, a_rank),
]
