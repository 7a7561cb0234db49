"""Who keeps a trace that a rank posts? Its home and every owner."""

from __future__ import annotations

from refill_service.cache_core.epoch_order import IdArray
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.peers.peers import BodyPieces

__all__ = ["keep_trace", "post_trace"]


async def post_trace(at_pod: JobAtPod, epoch: int, rank: int, sample_ids: IdArray) -> None:
    """Of a rank of this home. Errors as :meth:`Job.post_trace` and :meth:`RankEntry.check_comes_next`."""
    at_pod.home.entry.check_comes_next(epoch, rank)
    await keep_trace(at_pod, epoch, rank, sample_ids)
    await at_pod.peers.call_all("PUT", f"epochs/{epoch}/ranks/{rank}/trace", BodyPieces(sample_ids))


async def keep_trace(at_pod: JobAtPod, epoch: int, rank: int, sample_ids: IdArray) -> None:
    """At this pod. Errors as :meth:`Job.post_trace`."""
    await at_pod.job.post_trace(epoch, rank, sample_ids)
    at_pod.owner.trace_posted()
