"""What can go wrong in a run of chaos? Each file has the kinds of one subject, each with a line that says it."""

from __future__ import annotations

from tests.chaos.kinds import bystanders, journals, links, ordered_ends, planned, pods, ranks, resumes, store, zombies
from tests.chaos.kinds.kind import Kind

__all__ = ["ALL", "THEMES", "Kind"]

ALL: dict[str, Kind] = {
    kind.name: kind
    for module in (pods, journals, ordered_ends, links, ranks, resumes, bystanders, store, zombies, planned)
    for kind in module.KINDS
}

THEMES = {
    "apart": "rank 0 is four times as fast as the others: an epoch ahead of them, as far as it may",
    "killed": "ranks are killed whatever becomes of the volumes: what they had may be unknown from then on",
} | {kind.theme: kind.says for kind in ALL.values() if kind.theme}
"""What a seed may draw beside the faults that all have."""
