"""What is kept of a run at one pod when it ends? And what do the parts of all pods say together?

The receipt of an epoch, and its counts, as those of a job that runs.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from refill.errors import EpochNotReady, InvalidInput
from refill_service.cache_core.kept_runs import RunPart
from refill_service.cache_core.receipt import positions_of, sum_of_parts, without_damaged
from refill_service.jobs.job import Job
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.jobs.job_figures import sum_of_counts

__all__ = ["about_job", "counts_of_parts", "part_of_job", "receipt_of_parts"]


async def part_of_job(at_pod: JobAtPod, ended_at: float) -> RunPart | None:
    """Of a job that has been closed. None: nobody had asked for anything."""
    epochs = dict(at_pod.ended)
    for epoch in at_pod.owner.books.epochs_begun:
        with contextlib.suppress(InvalidInput, EpochNotReady):  # nobody can have been served in it
            epochs[epoch] = await at_pod.receipt_here(epoch)
    return RunPart.of(about_job(at_pod.job, ended_at), epochs.values()) if epochs else None


def about_job(job: Job, ended_at: float = 0.0) -> dict[str, Any]:
    """What it is, beside what it delivered.

    :param ended_at: seconds since 1970; 0: it has not ended.
    """
    spec = job.spec
    return {
        "job": spec.name,
        "run": job.incarnation,
        "team": spec.holder,
        "pod": job.ordinal,
        "num_pods": job.num_pods,
        "dataset": spec.dataset,
        "policy": job.policy,
        "policy_asked": spec.policy,
        "seed": spec.seed,
        "world_size": spec.world_size,
        "ended_at": ended_at,
        "owns_nothing": np.flatnonzero(np.diff(job.owner_bounds) == 0).tolist(),  # these pods have no part in any epoch
    }


def receipt_of_parts(about: dict[str, Any], parts: list[dict[str, Any]], epoch: int) -> dict[str, Any]:
    """As :meth:`JobAtPod.receipt`.

    :param about: of any of the parts.
    :param parts: each pod's of this epoch.
    """
    total = without_damaged(sum_of_parts(parts), parts)
    of_what = {name: about[name] for name in ("job", "run", "seed", "policy", "policy_asked")}
    ended = about["ended_at"] > 0
    found = {"repeats": sum(part["repeats"] for part in parts)} | total.to_dict()
    found |= positions_of(parts, total)
    running = not ended and not found["exact"] and epoch >= max(about.get("epochs", [epoch]))
    state = {"epoch": epoch, "ended": ended, "running": running}
    return of_what | state | found


def counts_of_parts(about: dict[str, Any], parts: dict[int, dict[str, Any]], epoch: int) -> dict[str, Any]:
    """As :func:`counts_of_all_pods`.

    :param parts: by pod.
    """
    of_what = {"job": about["job"], "run": about["run"], "epoch": epoch, "ended": about["ended_at"] > 0}
    return of_what | sum_of_counts(part["counts"] for part in parts.values())
