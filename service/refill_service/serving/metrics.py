"""What can Prometheus see of a pod? Read from the pod's state at the moment of the scrape; nothing is counted twice."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from refill import __version__
from refill.build import commit
from refill_service.jobs.job_figures import MOST_CLIENTS, RECEIPT_OUTCOMES
from refill_service.observing.metric_labels import JOB, OTHER_RANKS

if TYPE_CHECKING:
    from refill_service.jobs.job_at_pod import JobAtPod
    from refill_service.jobs.job_figures import JobFigures
    from refill_service.planned.planned_job import PlannedJob
    from refill_service.pod.cache_node import CacheNode

_PIECE_NANOSECONDS = 250_000
_COUNTS_AT_ONCE = 500
"""Of epochs and ranks: the jobs of one piece have about so many."""


def families(node: CacheNode) -> Iterator[Metric]:
    """What metrics there are, of a pod as it is, without those of jobs."""
    yield from _registry(node, _Sums()).collect()
    yield from _jobs({})


def _registry(node: CacheNode, sums: _Sums) -> CollectorRegistry:
    """Of one pod, its process included."""
    registry = CollectorRegistry()
    registry.register(_NodeCollector(node, sums))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


async def text_of(node: CacheNode, team: str | None = None) -> bytes:
    """All metrics. It takes milliseconds, and with thousands of jobs a second: others have their turns in between.

    :param team: whose jobs are shown; None: all.
    """
    sums, of_jobs, since = _Sums(), dict[str, list[bytes]](), time.thread_time_ns()

    async def others_turn() -> None:
        nonlocal since
        if time.thread_time_ns() > since + _PIECE_NANOSECONDS:
            await asyncio.sleep(0)
            since = time.thread_time_ns()

    for jobs in _in_pieces(node):
        figures: dict[str, JobFigures] = {}
        for job in jobs:
            found = job.figures()
            sums.add(found)
            if team is None or job.spec.holder in ("", team):
                figures[job.spec.name] = found
            await others_turn()
        for metric in _jobs(figures):
            lines = generate_latest(_One(metric)).splitlines(keepends=True)
            known = of_jobs.setdefault(metric.name, lines[:_HEAD_LINES])
            known.append(b"".join(lines[_HEAD_LINES:]))
            await others_turn()
    pieces = []
    for metric in _registry(node, sums).collect():
        pieces.append(generate_latest(_One(metric)))
        await others_turn()
    return b"".join([*pieces, *(piece for known in of_jobs.values() for piece in known)])


_HEAD_LINES = 2
"""Of a metric: its help and its type."""


def _in_pieces(node: CacheNode) -> Iterator[list[JobAtPod | PlannedJob]]:
    """All jobs, at least one piece."""
    piece: list[JobAtPod | PlannedJob] = []
    num_counts = 0
    jobs: list[JobAtPod | PlannedJob] = [*node.jobs.values(), *node.planned.jobs.values()]
    for job in jobs:
        piece.append(job)
        num_counts += 20 + job.num_counts
        if num_counts > _COUNTS_AT_ONCE:
            yield piece
            piece, num_counts = [], 0
    yield piece


class _Sums:
    """Over all jobs, whoever's they are."""

    def __init__(self) -> None:
        self.num_jobs = self.resident_bytes = self.remote_bytes = self.recent_bytes = 0
        self.waiting: Counter[int] = Counter()
        self.sent_bytes: Counter[int] = Counter()

    def add(self, figures: JobFigures) -> None:
        self.num_jobs += 1
        self.resident_bytes += figures.resident_bytes
        self.remote_bytes += figures.remote_bytes
        self.recent_bytes += figures.recent_bytes
        self.waiting.update(figures.waiting)
        self.sent_bytes.update(figures.sent_bytes)


class _One(Collector):
    """A collector of one metric, which was made already."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


class _NodeCollector(Collector):
    """Makes the metrics of a pod when they are scraped, but for those of each job."""

    def __init__(self, node: CacheNode, sums: _Sums) -> None:
        self._node = node
        self._sums = sums

    def collect(self) -> Iterator[Metric]:
        build = InfoMetricFamily("refill_build", "The version of refill that the pod runs, and its commit.")
        build.add_metric([], {"version": __version__, "commit": commit()})
        yield build
        yield GaugeMetricFamily(
            "refill_pods", "How many pods the cache is to have, as this one was told.", self._node.settings.num_pods
        )
        yield from self._memory()
        yield from self._requests()
        yield from self._pods_away()
        yield from self._peers()
        yield from self._store()

    def _memory(self) -> Iterator[Metric]:
        node = self._node
        yield GaugeMetricFamily("refill_memory_budget_bytes", "The setting `memory_bytes`.", node.settings.memory_bytes)
        yield GaugeMetricFamily(
            "refill_memory_promised_bytes",
            "What the pod's resident set stays below: `memory_bytes` + 15 % + 200 MB + `extra_memory_bytes`, and what "
            "`sending_bytes` is beyond its default.",
            node.settings.promised_bytes,
        )
        resident = GaugeMetricFamily(
            "refill_resident_bytes",
            "Memory in use. `abstract`: samples of jobs; `remote`: sent ahead by other pods; `recent`: just sent; "
            "`in_flight`: being read; `pinned`: the pinned tier; `sending`: answers on their way; `receiving`: "
            "requests, and JSON of other pods, that are coming.",
            labels=["kind"],
        )
        resident.add_metric(["abstract"], self._sums.resident_bytes)
        resident.add_metric(["remote"], self._sums.remote_bytes)
        resident.add_metric(["recent"], self._sums.recent_bytes)
        resident.add_metric(["in_flight"], node.gate.used_bytes)
        resident.add_metric(["pinned"], node.pinned.used_memory_bytes)
        resident.add_metric(["sending"], node.sending_to_clients.inside_bytes + node.sending_to_pods.inside_bytes)
        received = node.bodies.used_bytes + node.bodies_of_pods.used_bytes + node.peers.answers.inside_bytes
        resident.add_metric(["receiving"], received)
        yield resident
        yield GaugeMetricFamily(
            "refill_pinned_disk_bytes",
            "Bytes of samples that the pinned tier keeps on the local disk.",
            node.pinned.used_disk_bytes,
        )
        yield CounterMetricFamily(
            "refill_pinned_damaged_samples",
            "Samples of the pinned tier found damaged on the local disk.",
            node.pinned.damaged_samples,
        )
        yield GaugeMetricFamily("refill_jobs", "Registered jobs.", self._sums.num_jobs)

    def _requests(self) -> Iterator[Metric]:
        under_way = GaugeMetricFamily(
            "refill_requests_under_way", "Requests being answered, of a `client` or another `pod`.", labels=["asker"]
        )
        for asker in ("client", "pod"):
            under_way.add_metric([asker], self._node.requests.under_way[asker])
        yield under_way
        refused = CounterMetricFamily(
            "refill_refused_requests", "Requests answered with a status of 400 or more.", labels=["status"]
        )
        for status, count in sorted(self._node.requests.by_status.items()):
            refused.add_metric([str(status)], count)
        yield refused
        yield CounterMetricFamily(
            "refill_connections_cut",
            "Connections cut off because a client sent or read too slowly.",
            self._node.requests.connections_cut,
        )

    def _pods_away(self) -> Iterator[Metric]:
        node = self._node
        waiting = GaugeMetricFamily(
            "refill_waiting_requests",
            "Requests of live jobs that wait for another pod to answer again.",
            labels=["peer"],
        )
        away = GaugeMetricFamily(
            "refill_peer_away",
            "1 where another pod gives no sign of life. Others then answer for planned jobs in its place.",
            labels=["peer"],
        )
        for pod in range(node.settings.num_pods):
            if pod != node.settings.ordinal:
                waiting.add_metric([str(pod)], self._sums.waiting[pod])
                away.add_metric([str(pod)], pod in node.pods_away.away)
        yield waiting
        yield away

    def _peers(self) -> Iterator[Metric]:
        node = self._node
        sent = Counter(node.peer_bytes_sent)
        sent.update(self._sums.sent_bytes)
        family = CounterMetricFamily("refill_peer_sent_bytes", "Bytes sent to another pod.", labels=["peer"])
        for pod, count in sorted(sent.items()):
            if pod != node.settings.ordinal:
                family.add_metric([str(pod)], count)
        yield family

    def _store(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "refill_store_requests",
            "Requests to the object store. One that is tried again counts once.",
            labels=["operation"],
        )
        moved = CounterMetricFamily(
            "refill_store_bytes", "Bytes read from and written to the store.", labels=["operation"]
        )
        errors = CounterMetricFamily(
            "refill_store_errors", "Of these, failed after all retries.", labels=["operation", "error"]
        )
        for operation, counts in self._node.store_counters.operations.items():
            requests.add_metric([operation], counts.requests)
            moved.add_metric([operation], counts.bytes)
            for error, times in counts.errors.items():
                errors.add_metric([operation, error], times)
        second = CounterMetricFamily(
            "refill_store_second_reads",
            "Second requests for bytes that a first one takes very long to bring; not counted above.",
            value=self._node.store_counters.second_reads,
        )
        won = CounterMetricFamily(
            "refill_store_second_reads_won",
            "Of these, answered first.",
            value=self._node.store_counters.second_reads_won,
        )
        yield from (requests, moved, errors, second, won, *self._node.store_seconds.collect())


def _jobs(jobs: dict[str, JobFigures]) -> Iterator[Metric]:
    answered = CounterMetricFamily(
        "refill_requests",
        "Positions that ranks asked this pod for, by where the sample was. `local`: its own; `remote_memory`: sent "
        "ahead by another pod; `remote_on_demand`: asked of another pod; `repeats`.",
        labels=[JOB, "answered"],
    )
    prefetched = CounterMetricFamily(
        "refill_prefetched_samples",
        "Samples sent ahead: `sent` by this pod as owner; `used` and `refused` by it as home pod.",
        labels=[JOB, "outcome"],
    )
    epoch = GaugeMetricFamily("refill_epoch", "The epoch that the job is in.", labels=[JOB])
    alive = GaugeMetricFamily(
        "refill_ranks_alive",
        "Ranks heard of here in the last 10 s. One of a planned job asks many pods; others ask their home alone.",
        labels=[JOB],
    )
    policy = GaugeMetricFamily("refill_job_policy", "1 for the policy that the job runs.", labels=[JOB, "policy"])
    for name, figures in jobs.items():
        policy.add_metric([name, figures.policy], 1)
        alive.add_metric([name], figures.ranks_alive)
        homes, owners = figures.homes, figures.owners
        for kind in ("local", "remote_memory", "remote_on_demand", "repeats"):
            answered.add_metric([name, kind], sum(getattr(counts, kind) for counts in homes))
        prefetched.add_metric([name, "sent"], sum(counts.core.sent_ahead for counts in owners.values()))
        prefetched.add_metric([name, "used"], sum(counts.remote_memory for counts in homes))
        prefetched.add_metric([name, "refused"], sum(counts.ahead_refused for counts in homes))
        if figures.epoch is not None:
            epoch.add_metric([name], figures.epoch)
    yield from (answered, prefetched, epoch, alive, policy)
    yield from _progress(jobs)
    yield from _owner_counters(jobs)
    yield from _client_counters(jobs)


def _progress(jobs: dict[str, JobFigures]) -> Iterator[Metric]:
    delivered = CounterMetricFamily(
        "refill_bytes_delivered", "Bytes of samples in the batches that this pod sent to ranks.", labels=[JOB]
    )
    share = GaugeMetricFamily("refill_share_bytes", "Bytes of the samples that this pod owns.", labels=[JOB])
    memory = GaugeMetricFamily("refill_job_memory_bytes", "Memory of this pod that the job was given.", labels=[JOB])
    positions = GaugeMetricFamily(
        "refill_epoch_positions", "Requests that this epoch has for this pod's share.", labels=[JOB]
    )
    answered = GaugeMetricFamily("refill_epoch_answered", "Of these, answered or sent ahead so far.", labels=[JOB])
    receipts = CounterMetricFamily(
        "refill_receipt_requests",
        "Of jobs with a live policy: requests of epochs that are over, by receipt: `delivered`, `duplicates`, "
        "`missing`.",
        labels=[JOB, "outcome"],
    )
    damaged = CounterMetricFamily(
        "refill_damaged_samples", 'Damaged samples that ranks went on without (`on_damaged="skip"`).', labels=[JOB]
    )
    received = GaugeMetricFamily(
        "refill_rank_received",
        "Of planned jobs: samples of the newest epoch that a rank has received. The rank with the least is behind.",
        labels=[JOB, "rank"],
    )
    oldest = GaugeMetricFamily(
        "refill_oldest_take_seconds",
        "Of planned jobs: how long the oldest request for samples of this pod's share has waited.",
        labels=[JOB],
    )
    for name, figures in jobs.items():
        for rank in list(figures.received)[:MOST_CLIENTS]:
            received.add_metric([name, str(rank)], figures.received[rank])
        if figures.oldest_take_seconds is not None:
            oldest.add_metric([name], figures.oldest_take_seconds)
        damaged.add_metric([name], figures.damaged)
        delivered.add_metric([name], sum(counts.delivered_bytes for counts in figures.homes))
        share.add_metric([name], figures.share_bytes)
        memory.add_metric([name], figures.memory_bytes)
        if figures.progress is not None:
            answered.add_metric([name], figures.progress[0])
            positions.add_metric([name], figures.progress[1])
        if figures.receipts is not None:
            for outcome in RECEIPT_OUTCOMES:
                receipts.add_metric([name, outcome], figures.receipts.get(outcome, 0))
    yield from (delivered, share, memory, positions, answered, receipts, damaged, received, oldest)


_CORE_COUNTERS = {
    "takes": ("refill_takes", "Requests answered with samples that this pod owns."),
    "misses": (
        "refill_misses",
        "Takes that nothing in memory could answer.",
    ),
    "refills_pinned": ("refill_refills_pinned", "Chunks that the pinned tier had."),
    "bytes_pinned": ("refill_bytes_pinned", "Bytes of chunks that the pinned tier had."),
    "bytes_shared": ("refill_bytes_shared", "Bytes of chunks that another job with the same `read_seed` has read."),
    "samples_read": ("refill_samples_read", "Samples in the chunks read from the store."),
    "samples_filled": ("refill_samples_filled", "Of these, samples put into slots."),
    "bytes_read": ("refill_bytes_read", "Bytes of the chunks read from the store."),
    "bytes_wasted": ("refill_bytes_wasted", "Of these, bytes that were not put into a slot."),
}
_SHELL_COUNTERS = {
    "waited_takes": (
        "refill_waited_takes",
        "Takes, and repeats, that waited for the store.",
    ),
    "wait_seconds": ("refill_miss_wait_seconds", "Time that requests waited for the store."),
    "refills_failed": ("refill_refills_failed", "Refills whose bytes did not come."),
    "replays": ("refill_replays", "Requests that were answered again."),
    "exact_reads": (
        "refill_exact_reads",
        "Samples read one by one: answers given again later, repeats, samples asked for by id.",
    ),
    "exact_bytes": ("refill_exact_bytes", "Bytes of these."),
    "given_up_bytes": (
        "refill_given_up_bytes",
        "Of planned jobs: bytes of samples that left memory before they were asked for, and are read again.",
    ),
}


def _owner_counters(jobs: dict[str, JobFigures]) -> Iterator[Metric]:
    refills = CounterMetricFamily(
        "refill_refills", "Chunks that were read, from the store or the pinned tier.", labels=[JOB]
    )
    for name, figures in jobs.items():
        refills.add_metric([name], sum(counts.core.refills for counts in figures.owners.values()))
    yield refills
    for counters, of_core in ((_CORE_COUNTERS, True), (_SHELL_COUNTERS, False)):
        for field, (metric, help_text) in counters.items():
            family = CounterMetricFamily(metric, help_text, labels=[JOB])
            for name, figures in jobs.items():
                epochs = figures.owners.values()
                family.add_metric([name], sum(getattr(counts.core if of_core else counts, field) for counts in epochs))
            yield family


def _client_counters(jobs: dict[str, JobFigures]) -> Iterator[Metric]:
    for field, metric, help_text in (
        (
            "data_wait_seconds",
            "refill_client_data_wait_seconds",
            "Time that training loops waited for data (`refill.timed`).",
        ),
        (
            "samples",
            "refill_client_samples",
            "Samples that ranks fetched. `other`: those beyond the first 1,024 ranks.",
        ),
        ("bytes", "refill_client_bytes", "Bytes that ranks fetched, likewise."),
    ):
        family = CounterMetricFamily(metric, help_text, labels=[JOB, "rank"])
        for name, at_pod in jobs.items():
            for rank, counts in sorted(at_pod.clients.of_rank.items()):
                family.add_metric([name, str(rank)], getattr(counts, field))
            if (
                field in ("samples", "bytes") and len(at_pod.clients.of_rank) >= MOST_CLIENTS
            ):  # shares of time have no sum
                family.add_metric([name, OTHER_RANKS], getattr(at_pod.clients.others, field))
        yield family
