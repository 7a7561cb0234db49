"""Which jobs does this pod serve, and with how much memory? Registers, looks up, counts and removes jobs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from urllib.parse import quote

import numpy as np
from prometheus_client import Histogram

from refill.credentials import ShownToken
from refill.errors import (
    JobError,
    JobLost,
    JobMoved,
    MemoryTooSmall,
    PodStopping,
    RefillError,
    UnknownJob,
)
from refill.protocol.incarnation import line_of, moves_of
from refill.protocol.job_spec import JobSpec
from refill.protocol.records import encode_records
from refill_service.cache_core.job_holder import check_holder
from refill_service.cache_core.job_memory import JobMemory
from refill_service.cache_core.policies.registry import kind_of
from refill_service.cache_core.posted_traces import trace_memory
from refill_service.cache_core.resumed_epoch import ResumedEpoch
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.cache_core.shared_room import SharedRoom
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.early_opening import EarlyOpening
from refill_service.datasets.index_room import IndexRoom
from refill_service.jobs.home import Home
from refill_service.jobs.job import Job
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.jobs.owner import Owner
from refill_service.journal.journal import Journal, KeptJob
from refill_service.membership.registration import Registration
from refill_service.membership.resuming import Resuming
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.client_memory import ClientMemory
from refill_service.memory.pinned_tier import PinnedTier
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings
from refill_service.object_store.store_url import parse_url
from refill_service.object_store.warm_stores import WarmStores
from refill_service.observing.request_counts import RequestCounts
from refill_service.peers.job_peers import JobPeers
from refill_service.peers.peers import Peers
from refill_service.pod.pod_phase import PodPhase
from refill_service.pod.settings import Settings

__all__ = ["CacheNode"]

log = logging.getLogger(__name__)

_FIRST_READS_BYTES = 1 << 20
"""In flight at first: some 10 ms of a 100 MB/s store, times the pods. It is filled after a few round trips."""

_CLIENT_MEMORY_FRACTION = 0.05
_BODIES_PART = 50
_LEAST_BODY_BYTES = 16 << 20
"""Requests hold little: 8 bytes for each position that they name."""
_MOST_OF_FREE = 4
"""A job alone may fill four fifths of what may be sent at once."""
_HAND_OVER_SECONDS = 2.0


class CacheNode:
    """One cache pod, without its servers.

    :param teams: those that share it; none where everybody is nobody's team.
    """

    def __init__(
        self,
        settings: Settings,
        store_settings: StoreSettings | None = None,
        teams: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.settings = settings
        self.quotas = settings.quotas(teams)
        self.store_seconds = Histogram(
            "refill_store_request_seconds",
            "Time of requests to the object store, retries included.",
            ["operation"],
            registry=None,
        )
        self.store_counters = StoreCounters(
            lambda request: self.store_seconds.labels(request.operation).observe(request.seconds)
        )
        self.client_memory = ClientMemory(int(settings.memory_bytes * _CLIENT_MEMORY_FRACTION), self.quotas)
        peer_token = ShownToken(Path(settings.peer_token)) if settings.peer_token else None
        self.peers = Peers(settings.peer_urls, settings.peer_timeout_seconds, peer_token, settings.peer_certificates)
        self.pinned = PinnedTier(
            int(settings.memory_bytes * settings.pinned_fraction),
            Path(settings.pinned_dir) if settings.pinned_dir else None,
            settings.pinned_dir_bytes,
        )
        self.journal = Journal(
            Path(settings.journal_dir) if settings.journal_dir else None, settings.journal_sync_seconds
        )
        self.gate = ByteGate(int(self.for_jobs_bytes * settings.in_flight_fraction), _FIRST_READS_BYTES)
        limit_bytes = settings.sending_limit_bytes // (2 if settings.num_pods > 1 else 1)
        self.sending_to_clients = ByteGate(limit_bytes, most_of_free=_MOST_OF_FREE)
        self.sending_to_pods = ByteGate(limit_bytes, most_of_free=_MOST_OF_FREE)
        """Apart from clients' answers, which wait for those of other pods: two could wait for each other."""
        bodies_bytes = max(_LEAST_BODY_BYTES, settings.memory_bytes // _BODIES_PART)
        self.bodies = SharedRoom(bodies_bytes)
        """Of clients' requests."""
        self.bodies_of_pods = SharedRoom(bodies_bytes, one_may_be_larger=True)
        """Of other pods' requests: what one of them knew when it ended comes as one, of any size."""
        self.phase = PodPhase.STARTING
        self.requests = RequestCounts()
        self.jobs: dict[str, JobAtPod] = {}
        self.peer_bytes_sent: dict[int, int] = {}
        self._stores = WarmStores(store_settings or StoreSettings.from_environment(), self.store_counters)
        self.index_room = IndexRoom(settings.memory_bytes)
        self.opening = EarlyOpening(self._open_dataset)
        self.registration = Registration(self)
        self.resuming = Resuming(self)
        self._cleaner: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.settings.unix_socket:
            self.client_memory.listen(f"{self.settings.unix_socket}.memory")
        self.journal.start()
        self._cleaner = asyncio.create_task(self._remove_idle_jobs())

    async def close(self) -> None:
        if self._cleaner is not None:
            self._cleaner.cancel()
            await asyncio.gather(self._cleaner, return_exceptions=True)
        for at_pod in list(self.jobs.values()):
            await self.close_job(at_pod, self.stopping())
            await self._hand_over(at_pod)
        self.jobs.clear()
        await self.journal.close()
        self.client_memory.close()
        await self.opening.close()
        await self.peers.close()
        self.pinned.close()

    def stopping(self) -> PodStopping:
        return PodStopping(f"pod {self.settings.ordinal} stops", pod=self.settings.ordinal)

    async def _hand_over(self, at_pod: JobAtPod) -> None:
        """Leave what was delivered with another pod, for the next pod of this name."""
        owner = at_pod.owner
        if owner.lost or not owner.begun:
            return
        body = encode_records(record for epoch in owner.live_epochs for record in owner.snapshot(epoch))
        for pod in at_pod.peers.others:
            with contextlib.suppress(RefillError, TimeoutError, OSError):
                if owner.journal is not None:
                    owner.journal.leaves_with(pod)
                async with asyncio.timeout(_HAND_OVER_SECONDS):
                    await self.peers.call(pod, "PUT", at_pod.peers.path("kept"), body)
                    return

    @property
    def for_jobs_bytes(self) -> int:
        return self.settings.memory_bytes - self.pinned.memory_bytes

    def jobs_of(self, team: str) -> dict[str, JobAtPod]:
        """Those that a team may hear of: its own, and what nobody registered with a token."""
        return {name: at_pod for name, at_pod in self.jobs.items() if at_pod.job.spec.holder in ("", team)}

    def job(self, name: str, incarnation: str | None = None, *, looked_at: bool = False) -> JobAtPod:
        """Raises :class:`UnknownJob`, or :class:`JobLost` when the asker means an earlier registration.

        :param looked_at: by somebody who watches, which does not keep an idle job alive.
        """
        at_pod = self.jobs.get(name)
        if at_pod is None:
            raise UnknownJob(f"pod {self.settings.ordinal} knows no job {name}: register it first", job=name)
        if incarnation is not None and incarnation != at_pod.job.incarnation:
            if line_of(incarnation) == line_of(at_pod.job.incarnation):
                raise self._moved(name, moves_of(incarnation) < at_pod.job.moves)
            raise self.is_another(name) if not at_pod.owner.lost else at_pod.owner.recovering()
        if not looked_at:
            at_pod.job.last_used = time.monotonic()
        return at_pod

    def _moved(self, name: str, on: bool) -> JobError:
        if on:
            return JobMoved(f"job {name} has moved to {self.settings.num_pods} pods: register it again", job=name)
        return UnknownJob(f"pod {self.settings.ordinal} does not know that job {name} has moved", job=name)

    def job_holder(self, name: str) -> str | None:
        """Whose token a job was registered with; None when this pod has no such job, not even of before a restart."""
        if (at_pod := self.jobs.get(name)) is not None:
            return at_pod.job.spec.holder
        return self.journal.holder_of(name)

    async def remove(self, name: str, holder: str | None = None) -> bool:
        """End a job on this pod, free its memory and forget what it delivered; False when there is none.

        :param holder: whose token asks for it; None: a pod for reasons of its own. Raises :class:`NotAllowed` when the
            job belongs to another one.
        """
        if holder is not None and (held_by := self.job_holder(name)) is not None:
            check_holder(name, held_by, holder)
        at_pod = self.jobs.pop(name, None)
        if at_pod is None:
            kept = self.journal.find(name)
            if kept is not None:
                self.journal.end(name, kept.header["incarnation"])
            return kept is not None
        self.journal.end(name, at_pod.job.incarnation)
        await self.close_job(at_pod, self.gone(name))
        return True

    async def forget(self, name: str) -> None:
        """Let go of a job that could not be taken up, as if this pod had never heard of it; journals stay."""
        if (at_pod := self.jobs.pop(name, None)) is not None:
            await self.close_job(at_pod, at_pod.owner.recovering())
            self.journal.let_go(name, at_pod.owner.journal)

    async def close_job(self, at_pod: JobAtPod, why: RefillError) -> None:
        """Requests under way end with ``why``."""
        if at_pod.recovery is not None:
            at_pod.recovery.cancel()
            await asyncio.gather(at_pod.recovery, return_exceptions=True)
        await at_pod.home.close(why)
        await at_pod.owner.close(why)
        await at_pod.job.dataset.close()
        self.pinned.release(at_pod.pinned)

    async def remove_everywhere(self, name: str, holder: str) -> bool:
        path = f"/peer/v1/jobs/{name}?holder={quote(holder, safe='')}"
        removed = await self.peers.call_all(self.others, "DELETE", path, None)
        return await self.remove(name, holder) or any(answer["removed"] for answer in removed)

    def check_taking_jobs(self) -> None:
        """Raises :class:`PodStopping` when the pod ends."""
        if self.phase is PodPhase.STOPPING:
            raise self.stopping()

    @property
    def others(self) -> list[int]:
        return [pod for pod in range(self.settings.num_pods) if pod != self.settings.ordinal]

    async def create(
        self, spec: JobSpec, incarnation: str, kept: KeptJob | None, resumed: ResumedEpoch | None, *, lost: bool
    ) -> JobAtPod:
        settings = self.settings
        self.check_taking_jobs()
        if kept is None:
            team = spec.holder
            self.quotas.check_jobs(team, sum(at_pod.job.spec.holder == team for at_pod in self.jobs.values()))
        dataset = await self.opening.take(spec.dataset)
        try:
            memory_bytes = self._memory_for(spec, 0 if kept is None else kept.header["memory_bytes"])
            # Before anything is made in its size; shares are about equal.
            dataset.check_room(-(-dataset.num_samples // settings.num_pods))
            layout = ChunkLayout(dataset.blobs.first_sample, spec.chunk_size or _chunk_size(spec, dataset))
            share = layout.share(settings.ordinal, settings.num_pods)
            records = await dataset.load_records(share.first_sample, share.end_sample)
            for_traces = trace_memory(memory_bytes, dataset.num_samples) if spec.order == "explicit" else 0
            memory = JobMemory(
                memory_bytes - for_traces,
                settings.remote_memory_fraction if settings.num_pods > 1 else 0.0,
                settings.recent_fraction,
                settings.in_flight_fraction,
                dataset.index.sample_bytes / max(1, dataset.num_samples),
            )
            job = Job(
                spec,
                dataset,
                records,
                layout,
                ordinal=settings.ordinal,
                num_pods=settings.num_pods,
                memory_bytes=memory_bytes,
                abstract_bytes=memory.abstract_bytes,
                incarnation=incarnation,
                trace_bytes=for_traces,
                resumed=resumed,
            )
            pinned = self.pinned.lease(str(parse_url(spec.dataset)), records)
        except BaseException:
            await dataset.close()
            raise
        owner = Owner(
            job,
            self.gate,
            pinned,
            memory.recent_bytes,
            settings.wait_seconds,
            answer_bytes=settings.answer_limit_bytes,
            lost=lost,
        )
        peers = JobPeers(
            spec.name,
            incarnation,
            settings.ordinal,
            settings.num_pods,
            self.peers,
            settings.wait_seconds,
            lambda pod: self.registration.introduce(pod, job),
        )
        home = Home(job, owner, peers, memory.remote_bytes, settings.wait_seconds, lost=lost)
        at_pod = JobAtPod(job, owner, home, peers, pinned)
        owner.epoch_ended = at_pod.epoch_ended
        return at_pod

    async def _open_dataset(self, url: str) -> Dataset:
        # Whoever it came from: a client, another pod, or a journal of before the settings were changed.
        store, kept = self._stores.get(url, self.settings.check_dataset(url))
        try:
            return await Dataset.open(url, store=store, owns_store=not kept, room=self.index_room)
        except BaseException:
            self._stores.forget(url)
            raise

    def is_another(self, name: str) -> JobLost:
        return JobLost(
            f"job {name} was ended or lost by the pods and was registered again since: its epoch can't go on with "
            f"every sample exactly once; end the job and start it anew (DELETE /v1/jobs/{name}), or use another name",
            job=name,
        )

    def gone(self, name: str) -> JobLost:
        return JobLost(f"job {name} was ended while it was asked for samples", job=name)

    def _memory_for(self, spec: JobSpec, kept_bytes: int) -> int:
        """:param kept_bytes: what the job has had before a restart, whatever its team has now; 0: it is a new one."""
        used: Counter[str] = Counter()
        for at_pod in self.jobs.values():
            used[at_pod.job.spec.holder] += at_pod.job.memory_bytes
        free = self.for_jobs_bytes - used.total()
        may_have = free if kept_bytes else self.quotas.left_for(spec.holder, self.for_jobs_bytes, used)
        wanted = kept_bytes or spec.memory_bytes or int(may_have * self.settings.job_memory_fraction)
        if wanted > may_have or wanted == 0:
            raise MemoryTooSmall(
                f"memory too small: job {spec.name} wants {wanted:,} bytes and pod {self.settings.ordinal} has "
                f"{may_have:,} of {self.settings.memory_bytes:,} free (pinned: {self.pinned.memory_bytes:,}; "
                f"taken: {self._taken(spec.holder)}{f'; kept for others: {free - may_have:,}' * (free > may_have)})",
                pod=self.settings.ordinal,
            )
        return wanted

    def _taken(self, team: str) -> str:
        """By whom memory is taken; of other teams in sum, since nobody is told which jobs they run."""
        mine = self.jobs_of(team)
        taken = [f"{name} {at_pod.job.memory_bytes:,}" for name, at_pod in mine.items()]
        if others := sum(at_pod.job.memory_bytes for name, at_pod in self.jobs.items() if name not in mine):
            taken.append(f"other teams {others:,}")
        return ", ".join(taken) or "none"

    async def _remove_idle_jobs(self) -> None:
        idle_seconds = self.settings.job_idle_seconds
        while True:
            await asyncio.sleep(min(10.0, idle_seconds / 4))
            for name in [n for n, at_pod in self.jobs.items() if at_pod.idle_seconds > idle_seconds]:
                if await self.registration.idle_everywhere(name):
                    log.info("job %s: nobody asked for %.0f s, removed", name, idle_seconds)
                    await self.remove(name)


def _chunk_size(spec: JobSpec, dataset: Dataset) -> int:
    sample_bytes = dataset.index.sample_bytes / max(1, dataset.num_samples)
    largest_blob = int(np.diff(dataset.blobs.first_sample).max(initial=1))
    return kind_of(spec.policy).default_chunk_size(dataset.num_samples, sample_bytes, largest_blob)
