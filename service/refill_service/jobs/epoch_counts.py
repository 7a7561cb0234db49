"""What happened in an epoch, here and over all pods? Counts, flat, as JSON has them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from refill_service.cache_core.home_machine import HomeCounts
from refill_service.cache_core.policies.interface import EpochCounts
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.jobs.running_epoch import OwnerCounts

__all__ = ["counts_here", "counts_of_all_pods"]


async def counts_of_all_pods(at_pod: JobAtPod, epoch: int) -> dict[str, Any]:
    """``{"pods": [counts of each pod], "total": their sum}``."""
    others = await at_pod.peers.call_all("GET", f"epochs/{epoch}")
    pods = sorted([counts_here(at_pod, epoch), *others], key=lambda counts: int(counts["pod"]))
    total: dict[str, Any] = {}
    for counts in pods:
        for name, value in counts.items():
            if name not in ("pod", "epoch"):
                total[name] = total.get(name, 0) + value
    return {"job": at_pod.job.spec.name, "epoch": epoch, "pods": pods, "total": total}


def counts_here(at_pod: JobAtPod, epoch: int) -> dict[str, Any]:
    """At this pod; zeros when nothing happened."""
    owner = at_pod.owner.history.get(epoch) or OwnerCounts(EpochCounts())
    home = at_pod.home.machine.history.get(epoch) or HomeCounts()
    owned = asdict(owner)
    core = owned.pop("core")
    counts: dict[str, Any] = {"pod": at_pod.job.ordinal, "epoch": epoch}
    counts |= core | {"bytes_wasted": owner.core.bytes_wasted} | owned | asdict(home)
    return counts
