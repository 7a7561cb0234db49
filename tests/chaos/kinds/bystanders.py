"""Who asks beside the ranks? Objects that only look, and second processes of a rank; both live on to the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.kinds.kind import Kind, a_rank
from tests.chaos.schedule import Fault

if TYPE_CHECKING:
    from tests.chaos.chaos_run import ChaosRun

_AT_ONCE = (0.0, 0.0)


def _begin(run: ChaosRun, fault: Fault) -> bool:
    """A twin that asks for the first time when all pods have lost all is another run of that name: none begins then,
    nor before the rank itself has had a sample, nor while it is down: who comes first is the rank. Nor while pods don't
    reach each other: it is waited for until it knows the job, and nothing is mended meanwhile."""
    if fault.target[0] >= len(run.ranks):
        return False
    if fault.kind == "twin" and (run.ranks_down or not (run.is_quiet and run.ranks_have_begun)):
        return False
    run.add_bystander(fault.kind, fault.target[0])
    return True


KINDS = [
    Kind(
        "observer",
        "a process registers the job as a rank, for its length and the epoch's counts, and asks for no batch",
        lambda _: 4,
        _begin,
        a_rank,
        theme="observers",
        lasts=_AT_ONCE,
        most=2,
    ),
    Kind(
        "twin",
        "a second process of a rank asks for its batches, and is to be refused each time",
        lambda of: 4 * ("lost" not in of.themes),
        _begin,
        a_rank,
        theme="twins",
        lasts=_AT_ONCE,
        most=2,
    ),
]
