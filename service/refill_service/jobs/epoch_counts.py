"""What happened in an epoch, here and over all pods? Counts, flat, as JSON has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from refill_service.cache_core.home_machine import HomeCounts
from refill_service.cache_core.policies.interface import EpochCounts
from refill_service.jobs.running_epoch import OwnerCounts

if TYPE_CHECKING:
    from refill_service.jobs.job_at_pod import JobAtPod

__all__ = ["counts_here", "counts_of", "counts_of_all_pods", "sum_of_counts"]


async def counts_of_all_pods(at_pod: JobAtPod, epoch: int) -> dict[str, Any]:
    """``{"pods": [counts of each pod], "total": their sum}``, and of what."""
    counts = [counts_here(at_pod, epoch), *await at_pod.peers.call_all("GET", f"epochs/{epoch}")]
    of_what = {"job": at_pod.job.spec.name, "run": at_pod.job.incarnation, "epoch": epoch, "ended": False}
    return of_what | sum_of_counts(counts)


def sum_of_counts(counts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    pods = sorted(counts, key=lambda counts: int(counts["pod"]))
    total: dict[str, Any] = {}
    for each in pods:
        for name, value in each.items():
            if name not in ("pod", "epoch"):
                total[name] = total.get(name, 0) + value
    return {"pods": pods, "total": total}


def counts_here(at_pod: JobAtPod, epoch: int) -> dict[str, Any]:
    """At this pod; zeros when nothing happened."""
    owner = at_pod.owner.history.get(epoch)
    home = at_pod.home.machine.history.get(epoch)
    return counts_of(at_pod.job.ordinal, epoch, owner, home)


def counts_of(pod: int, epoch: int, owner: OwnerCounts | None, home: HomeCounts | None) -> dict[str, Any]:
    """None: nothing happened."""
    owner, home = owner or OwnerCounts(EpochCounts()), home or HomeCounts()
    owned = asdict(owner)
    core = owned.pop("core")
    counts: dict[str, Any] = {"pod": pod, "epoch": epoch}
    counts |= core | {"bytes_wasted": owner.core.bytes_wasted} | owned | asdict(home)
    return counts
