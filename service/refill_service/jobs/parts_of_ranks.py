"""Which parts of a dataset does a rank read? As its home sees it, for ranks that look whether all read the same."""

from __future__ import annotations

from typing import Any

from refill.errors import UnknownJob
from refill.protocol.part_names import whole_of
from refill_service.jobs.job_table import JobTable

__all__ = ["parts_of_rank"]


def parts_of_rank(table: JobTable, name: str, rank: int) -> dict[str, Any]:
    """Whether a rank has come to this job here, and the jobs of other parts of the same dataset that it reads now.
    Raises :class:`UnknownJob`."""
    jobs = {**table.planned, **table.jobs}
    if name not in jobs:
        raise UnknownJob(f"pod {table.settings.ordinal} knows no job {name}", job=name)
    asked, whole = jobs[name], whole_of(name)
    others = [
        other
        for other, at_pod in jobs.items()
        if whole is not None
        and other != name
        and whole_of(other) == whole
        and (at_pod.spec.holder, at_pod.spec.world_size) == (asked.spec.holder, asked.spec.world_size)
        and at_pod.use.is_there(rank)
    ]
    return {"here": asked.use.has_come(rank), "others": others}
