"""How are jobs, ranks and pods doing? Computed from two scrapes of all pods; pure.

The same figures as the dashboards': what they divide, and what counts as waste, is said there and in docs/SETTINGS.md.
None stands for a figure that can't be told: nothing was read, so there is no share of it that was wasted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refill_service.observing.metric_labels import OTHER_RANKS
from refill_service.top.scrape import Scrape

_REPORTED_SECONDS = 4.0
"""Ranks report what they have received every three seconds."""
_OUTCOMES = ("delivered", "missing", "duplicates")


@dataclass(frozen=True)
class RankFigures:
    """What ``refill top`` shows of a rank that waits for data."""

    job: str
    rank: int
    data_wait_share: float
    """Part of the time that its loop was blocked in the loader."""
    samples_per_second: float


@dataclass(frozen=True)
class RankBehind:
    """A rank that is behind the others, which may keep them waiting."""

    rank: int
    received: int
    """Samples of the newest epoch."""
    most_received: int
    """By another rank."""


@dataclass(frozen=True)
class JobFigures:
    """What ``refill top`` shows of a job."""

    name: str
    epoch: int | None
    """None before the first that a rank has entered."""
    ranks_alive: int | None
    """None where the pods do not say it."""
    progress: float | None
    """Part of the epoch's requests that were answered or sent ahead; a pod that does not answer counts for nothing."""
    epoch_ends_in_seconds: float | None
    samples_per_second: float
    delivered_bytes_per_second: float
    memory_bytes: int
    """What the pods have given it."""
    miss_rate: float | None
    waste: float | None
    read_amplification: float | None
    receipts: dict[str, int] | None
    """Requests of epochs that are over, by what their receipts say; without zeros, and empty before the first. None:
    pods count none, as of planned jobs."""
    ranks: list[RankFigures]
    behind: Sequence[RankBehind] = ()
    """Ranks that received nothing between both scrapes, and have less than others: these wait for them, where a loop
    has its ranks go in step."""


@dataclass(frozen=True)
class PodFigures:
    """What ``refill top`` shows of a pod."""

    url: str
    answers: bool
    memory_bytes: dict[str, int]
    """Of samples, by kind."""
    budget_bytes: int
    process_bytes: int
    promised_bytes: int
    """What the process stays below."""
    cpu_cores: float | None
    store_bytes_per_second: float
    store_requests_per_second: float
    store_seconds: float | None
    """Of a read, on average."""
    store_errors: int
    """Since the earlier scrape, without requests that were given up."""
    waiting_requests: int
    """Of this pod, for others to come back."""
    is_away: bool = False
    """Gives no sign of life, as another pod says, so that others answer in its place."""
    take_seconds: float = 0.0
    """For how long the oldest request for samples of its shares has waited."""


@dataclass(frozen=True)
class Figures:
    """What one frame of ``refill top`` shows."""

    jobs: list[JobFigures]
    pods: list[PodFigures]


def figures_between(before: Scrape, now: Scrape) -> Figures:
    """States are those of the later scrape, rates those of the time between both."""
    jobs = sorted(now.labels("refill_share_bytes", "training_job"))
    away = {number for number, is_away in now.most_by("refill_peer_away", "peer").items() if is_away}
    pods = [_pod(url, before, now, is_away=str(number) in away) for number, url in enumerate(now.pods)]
    return Figures([_job(job, before, now) for job in jobs], pods)


def _job(job: str, before: Scrape, now: Scrape) -> JobFigures:
    seconds = now.at_seconds - before.at_seconds

    def grown(name: str, **labels: str) -> float:
        return now.increase(before, name, training_job=job, **labels)

    def total(name: str, **labels: str) -> float:
        return now.total(name, training_job=job, **labels)

    positions, answered = total("refill_epoch_positions"), total("refill_epoch_answered")
    takes, read = grown("refill_takes_total"), grown("refill_bytes_read_total")
    delivered = grown("refill_bytes_delivered_total")
    counted = now.labels("refill_receipt_requests_total", "outcome", training_job=job)
    receipts = {name: int(total("refill_receipt_requests_total", outcome=name)) for name in _OUTCOMES}
    found = now.labels("refill_client_samples_total", "rank", training_job=job)
    ranks = sorted((rank for rank in found if rank != OTHER_RANKS), key=int)
    epoch = int(now.most("refill_epoch", -1, training_job=job))
    says_who_is_alive = bool(now.labels("refill_ranks_alive", "training_job", training_job=job))
    return JobFigures(
        name=job,
        epoch=epoch if epoch >= 0 else None,
        ranks_alive=int(total("refill_ranks_alive")) if says_who_is_alive else None,
        progress=_ratio(answered, positions),
        epoch_ends_in_seconds=_ratio((positions - answered) * seconds, takes),
        samples_per_second=grown("refill_requests_total") / seconds,
        delivered_bytes_per_second=delivered / seconds,
        memory_bytes=int(total("refill_job_memory_bytes")),
        miss_rate=_ratio(grown("refill_misses_total"), takes),
        waste=_ratio(grown("refill_bytes_wasted_total"), read),
        read_amplification=_ratio(read + grown("refill_exact_bytes_total"), delivered),
        receipts={name: count for name, count in receipts.items() if count} if counted else None,
        ranks=[
            RankFigures(
                job,
                int(rank),
                data_wait_share=grown("refill_client_data_wait_seconds_total", rank=rank) / seconds,
                samples_per_second=grown("refill_client_samples_total", rank=rank) / seconds,
            )
            for rank in ranks
        ],
        behind=_behind(job, before, now) if seconds >= _REPORTED_SECONDS else [],
    )


def _behind(job: str, before: Scrape, now: Scrape) -> list[RankBehind]:
    then, received = (each.most_by("refill_rank_received", "rank", training_job=job) for each in (before, now))
    least, most = min(received.values(), default=0.0), max(received.values(), default=0.0)
    return [
        RankBehind(int(rank), int(least), int(most))
        for rank in sorted(received, key=int)
        if received[rank] == least < most and then.get(rank) == least
    ]


def _pod(url: str, before: Scrape, now: Scrape, *, is_away: bool) -> PodFigures:
    seconds = now.at_seconds - before.at_seconds

    def grown(name: str, **labels: str) -> float:
        return now.increase(before, name, url, **labels)

    def total(name: str, **labels: str) -> float:
        return now.total(name, url, **labels)

    reads = {"operation": "read_range"}
    errors = grown("refill_store_errors_total") - grown("refill_store_errors_total", error="Cancelled")
    kinds = now.labels("refill_resident_bytes", "kind", url)
    both = now.pods[url] is not None and before.pods.get(url) is not None
    return PodFigures(
        url=url,
        answers=now.pods[url] is not None,
        memory_bytes={kind: int(total("refill_resident_bytes", kind=kind)) for kind in kinds},
        budget_bytes=int(total("refill_memory_budget_bytes")),
        process_bytes=int(total("process_resident_memory_bytes")),
        promised_bytes=int(total("refill_memory_promised_bytes")),
        cpu_cores=grown("process_cpu_seconds_total") / seconds if both else None,
        store_bytes_per_second=grown("refill_store_bytes_total", **reads) / seconds,
        store_requests_per_second=grown("refill_store_requests_total", **reads) / seconds,
        store_seconds=_ratio(
            grown("refill_store_request_seconds_sum", **reads), grown("refill_store_request_seconds_count", **reads)
        ),
        store_errors=int(errors),
        is_away=is_away,
        take_seconds=now.most("refill_oldest_take_seconds", 0.0, url),
        waiting_requests=int(total("refill_waiting_requests")),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
