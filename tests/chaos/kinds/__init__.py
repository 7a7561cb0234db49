"""What can go wrong in a run of chaos? Each file has the kinds of one subject, each with a line that says it.

What loses the memory of a pod meets planned jobs, and live ones in the theme ``lost`` alone.
"""

from __future__ import annotations

from tests.chaos.kinds import bystanders, links, lost, ordered_ends, planned, pods, ranks, resumes, store, sweeps
from tests.chaos.kinds.kind import Kind

__all__ = ["ALL", "LIVE_THEMES", "NAMED_THEMES", "PLANNED_THEMES", "THEMES", "Kind"]

ALL: dict[str, Kind] = {
    kind.name: kind
    for module in (pods, ordered_ends, links, ranks, resumes, bystanders, store, planned, lost, sweeps)
    for kind in module.KINDS
}

THEMES = {
    "apart": "rank 0 is four times as fast as the others: an epoch ahead of them, as far as it may",
    "mixture": "the job is a mixture of two or three datasets, whose weights may change",
} | {kind.theme: kind.says for kind in ALL.values() if kind.theme}
"""What a run may have beside the faults that all have."""
LIVE_THEMES = ("lost",)
NAMED_THEMES = ("sweep",)
"""No seed draws these: what a seed draws stays what it was before there were any."""
PLANNED_THEMES = ("memory", "ends", "scaling", "resumes", "plans", "partitions", "replaced", "mixture")
