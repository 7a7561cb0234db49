"""What is there to be kept of a run at one pod when it ends, or when the pod finds it in its journal?

And what do the parts of all pods say together? The receipt of an epoch, and its counts, as those of a job that runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from refill.errors import EpochNotReady, InvalidInput
from refill.protocol.incarnation import line_of
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.epoch_order import ExplicitTraces, KeyedTraces, Traces
from refill_service.cache_core.kept_runs import RunPart
from refill_service.cache_core.policies.registry import policy_that_runs
from refill_service.cache_core.receipt import (
    draws_of,
    positions_of,
    receipt_of,
    sum_of_parts,
    without_damaged,
)
from refill_service.cache_core.recollection import Recollection
from refill_service.jobs.epoch_counts import no_counts, sum_of_counts
from refill_service.jobs.job import Job
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.journal.kept_job import KeptJob

__all__ = [
    "about_job",
    "counts_of_parts",
    "part_of_job",
    "part_of_journal",
    "parts_without_receipt",
    "receipt_of_parts",
]


async def part_of_job(at_pod: JobAtPod, ended_at: float) -> RunPart | None:
    """Of a job that has been closed. None: nobody had asked for anything."""
    epochs = dict(at_pod.ended)
    for epoch in at_pod.owner.books.epochs_begun:
        with contextlib.suppress(InvalidInput, EpochNotReady):  # nobody can have been served in it
            epochs[epoch] = await at_pod.receipt_here(epoch)
    return RunPart.of(about_job(at_pod.job, ended_at), epochs.values()) if epochs else None


def about_job(job: Job, ended_at: float = 0.0) -> dict[str, Any]:
    """What it is, beside what it delivered.

    :param ended_at: seconds since 1970; 0: it has not ended, as far as is known.
    """
    of_pods = np.diff(job.owner_bounds)
    owns_nothing = np.flatnonzero(of_pods == 0).tolist()
    return _about(job.spec, job.incarnation, job.ordinal, job.num_pods, ended_at, owns_nothing)


def part_of_journal(kept: KeptJob, ordinal: int, ended_at: float = 0.0) -> RunPart:
    """Of a job that nobody has asked for since the pod was restarted. Epochs that had not ended are left out where the
    journal is not whole: others know more of them."""
    header = kept.header
    spec = JobSpec.from_dict(header["spec"])
    epochs = kept.receipts | {part["epoch"]: part for part in parts_without_receipt(kept, ordinal)}
    first, end = header.get("share", (0, 1))
    owns_nothing = [ordinal] if first == end else []
    about = _about(spec, header["incarnation"], ordinal, header["num_pods"], ended_at, owns_nothing)
    return RunPart.of(about, epochs.values())


def parts_without_receipt(kept: KeptJob, ordinal: int) -> Iterator[dict[str, Any]]:
    """Of the epochs whose receipts the pod had yet to write when it ended. None where its journal is not whole."""
    if not kept.whole or "share" not in kept.header:  # of an earlier version
        return
    spec = JobSpec.from_dict(kept.header["spec"])
    recollection = Recollection()
    recollection.add(kept.records, ordinal)
    recollection.table_is_whole = True
    first, end = kept.header["share"]
    newest = max([-1, *kept.receipts, *recollection.epochs_of_table()])
    for epoch in recollection.epochs_of_table() + [entered for entered in recollection.entered if entered > newest]:
        if epoch in kept.receipts or (traces := _traces(kept, spec, recollection, epoch)) is None:
            continue
        answered = recollection.answered(epoch, traces, first, end)
        unknown = [rank for rank, known_from in recollection.known_from.items() if epoch < known_from]
        receipt = receipt_of(*answered, first, end, traces, unknown)
        begun = epoch <= newest
        drawn = {"draws": draws_of(traces, first, end), "ran_before": True} if spec.is_by_importance else {}
        part = {"epoch": epoch, "begun": begun, "receipt": receipt.to_dict(), "unused_ahead": {}, "repeats": 0}
        yield part | drawn


def _traces(kept: KeptJob, spec: JobSpec, recollection: Recollection, epoch: int) -> Traces | None:
    posted = {rank: ids for (of_epoch, rank), ids in recollection.traces.items() if of_epoch == epoch}
    num_samples = kept.header["num_samples"]
    if len(posted) == spec.world_size:
        return ExplicitTraces(num_samples, posted)
    return KeyedTraces.of_job(spec, epoch, num_samples) if spec.order == "keyed" else None


def _about(
    spec: JobSpec,
    incarnation: str,
    pod: int,
    num_pods: int,
    ended_at: float,
    owns_nothing: list[int],
) -> dict[str, Any]:
    """:param owns_nothing: the pods that own no sample, as far as this one knows: they have no part in any epoch."""
    return {
        "job": spec.name,
        "run": line_of(incarnation),
        "team": spec.holder,
        "pod": pod,
        "num_pods": num_pods,
        "dataset": spec.dataset,
        "policy": policy_that_runs(spec.policy, shuffle=spec.shuffle),
        "policy_asked": spec.policy,
        "seed": spec.seed,
        "world_size": spec.world_size,
        "ended_at": ended_at,
        "owns_nothing": owns_nothing,
    }


def receipt_of_parts(about: dict[str, Any], parts: list[dict[str, Any]], epoch: int) -> dict[str, Any]:
    """As :meth:`JobAtPod.receipt`.

    :param about: of any of the parts.
    :param parts: each pod's of this epoch.
    """
    total = without_damaged(sum_of_parts(parts), parts)
    of_what = {name: about[name] for name in ("job", "run", "seed", "policy")}
    of_what["policy_asked"] = about.get("policy_asked", about["policy"])  # not said by pods of an earlier version
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
    return of_what | sum_of_counts(part.get("counts") or no_counts(pod, epoch) for pod, part in parts.items())
