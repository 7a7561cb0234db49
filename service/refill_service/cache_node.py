"""Which jobs does this pod serve, and with how much memory? Registers, looks up, counts and removes jobs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import Histogram

from refill.errors import InvalidInput, JobConflict, JobError, JobLost, MemoryTooSmall, RefillError, UnknownJob
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import BatchRequest, Int64Array
from refill_service.byte_gate import ByteGate
from refill_service.cache_core.owner_epoch import EpochCounts
from refill_service.cache_core.sample_mapping import ChunkLayout, default_chunk_size
from refill_service.client_memory import ClientMemory
from refill_service.datasets.dataset_reader import Dataset
from refill_service.early_opening import EarlyOpening
from refill_service.home import Home, HomeCounts
from refill_service.job import Job
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings
from refill_service.object_store.warm_stores import WarmStores
from refill_service.owner import Owner, OwnerCounts
from refill_service.peers import Peers
from refill_service.pinned_tier import PinnedShare, PinnedTier
from refill_service.settings import Settings

__all__ = ["CacheNode", "ClientCounts", "JobAtPod"]

log = logging.getLogger(__name__)

_FIRST_READS_BYTES = 1 << 20
"""In flight at first: some 10 ms of a 100 MB/s store, times the pods. It is filled after a few round trips."""

_CLIENT_MEMORY_FRACTION = 0.05
_LEADER = 0
"""The pod that names the incarnation of a job, so that ranks that register at the same time agree."""


@dataclass
class ClientCounts:
    """What clients of one rank reported."""

    data_wait_seconds: float = 0.0
    request_wait_seconds: float = 0.0
    samples: int = 0
    bytes: int = 0


@dataclass
class JobAtPod:
    """A job here: what it is, the pod as its owner, the pod as the home of ranks."""

    job: Job
    owner: Owner
    home: Home
    pinned: PinnedShare
    clients: dict[int, ClientCounts] = field(default_factory=dict)

    def client(self, rank: int) -> ClientCounts:
        self.job.check_rank(rank)
        return self.clients.setdefault(rank, ClientCounts())

    async def asked_of_this_pod(self, request: BatchRequest) -> Int64Array:
        """The samples that a home pod's request asks of this pod's share."""
        job = self.job
        job.check_rank(request.rank)
        traces = await job.traces(request.epoch, self.owner.wait_seconds)
        if int(request.positions.max()) >= traces.length(request.rank):
            raise InvalidInput(f"rank {request.rank} has no position {int(request.positions.max())}")
        asked, repeats = traces.asked(request.rank, request.positions)
        if repeats.any() or not job.share.holds(asked).all():
            raise InvalidInput(
                f"pod {job.ordinal} was asked for positions that it does not answer: other job settings?"
            )
        return asked

    def epoch_counts(self, epoch: int) -> dict[str, Any]:
        """What happened at this pod in one epoch, flat; zeros when nothing did."""
        owner = self.owner.history.get(epoch) or OwnerCounts(EpochCounts())
        home = self.home.history.get(epoch) or HomeCounts()
        owned = asdict(owner)
        core = owned.pop("core")
        wasted = {"bytes_wasted": owner.core.bytes_wasted}
        counts: dict[str, Any] = {"pod": self.job.ordinal, "epoch": epoch}
        counts |= core | wasted | owned | asdict(home)
        return counts


class CacheNode:
    """One cache pod, without its servers."""

    def __init__(self, settings: Settings, store_settings: StoreSettings | None = None) -> None:
        self.settings = settings
        self.store_seconds = Histogram(
            "refill_store_request_seconds",
            "Time of requests to the object store, retries included.",
            ["operation"],
            registry=None,
        )
        self.store_counters = StoreCounters(
            lambda request: self.store_seconds.labels(request.operation).observe(request.seconds)
        )
        self.client_memory = ClientMemory(int(settings.memory_bytes * _CLIENT_MEMORY_FRACTION))
        self.peers = Peers(settings.peer_urls, settings.peer_timeout_seconds)
        self.pinned = PinnedTier(
            int(settings.memory_bytes * settings.pinned_fraction),
            Path(settings.pinned_dir) if settings.pinned_dir else None,
            settings.pinned_dir_bytes,
        )
        for_jobs = settings.memory_bytes - self.pinned.memory_bytes
        self.gate = ByteGate(int(for_jobs * settings.in_flight_fraction), _FIRST_READS_BYTES)
        self.jobs: dict[str, JobAtPod] = {}
        self.peer_bytes_sent: dict[int, int] = {}
        self._stores = WarmStores(store_settings or StoreSettings.from_environment(), self.store_counters)
        self.opening = EarlyOpening(self._open_dataset)
        self._registering = asyncio.Lock()
        self._cleaner: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.settings.unix_socket:
            self.client_memory.listen(f"{self.settings.unix_socket}.memory")
        self._cleaner = asyncio.create_task(self._remove_idle_jobs())

    async def close(self) -> None:
        if self._cleaner is not None:
            self._cleaner.cancel()
            await asyncio.gather(self._cleaner, return_exceptions=True)
        for name in list(self.jobs):
            await self.remove(name)
        self.client_memory.close()
        await self.opening.close()
        await self.peers.close()
        self.pinned.close()

    @property
    def free_bytes(self) -> int:
        for_jobs = self.settings.memory_bytes - self.pinned.memory_bytes
        return for_jobs - sum(at_pod.job.memory_bytes for at_pod in self.jobs.values())

    async def register(self, spec: JobSpec) -> dict[str, Any]:
        """Register a job on every pod; registering it again with the same settings changes nothing."""
        if spec.name in self.jobs:
            return await self._register(spec)
        self.opening.begin(spec.dataset)
        telling = asyncio.create_task(self._tell_others(spec))
        try:
            return await self._register(spec)
        finally:
            await telling

    async def _tell_others(self, spec: JobSpec) -> None:
        """That they may open the dataset; what is wrong with them is found when they are to register the job."""
        others = [pod for pod in range(self.settings.num_pods) if pod != self.settings.ordinal]
        with contextlib.suppress(RefillError):
            body = {"dataset": spec.dataset}
            await self.peers.call_all(others, "POST", f"/peer/v1/jobs/{spec.name}/opening", body)

    async def _register(self, spec: JobSpec) -> dict[str, Any]:
        ordinal, path = self.settings.ordinal, f"/peer/v1/jobs/{spec.name}"
        leader: dict[str, Any] = {"incarnation": "", "fingerprint": "", "begun": False, "created": False}
        if ordinal != _LEADER:
            leader = await self.peers.call(_LEADER, "PUT", path, {"spec": spec.to_dict()})
        created = leader["created"]
        try:
            info = await self.register_here(spec, leader["incarnation"], leader["fingerprint"], begun=leader["begun"])
            created = created or info.pop("created")
            others = [pod for pod in range(self.settings.num_pods) if pod not in (ordinal, _LEADER)]
            body = {
                "spec": spec.to_dict(),
                "incarnation": info["incarnation"],
                "fingerprint": info["fingerprint"],
                "begun": leader["begun"] or info["begun"],
            }
            await self.peers.call_all(others, "PUT", path, body)
        except RefillError as error:
            # One pod refuses it for good: the others must not keep it, or its name and memory would be taken.
            if created and error.status != 503 and not isinstance(error, JobError):
                with contextlib.suppress(RefillError):
                    await self.remove_everywhere(spec.name)
            raise
        return info | {"pods": list(self.settings.pod_urls)}

    async def register_here(
        self, spec: JobSpec, incarnation: str, fingerprint: str, *, begun: bool = False
    ) -> dict[str, Any]:
        """Register a job on this pod only.

        :param incarnation: as another pod names it; empty: whatever it is here, a new one if need be.
        :param fingerprint: of the dataset as another pod read it; empty: any.
        :param begun: whether ranks were seen to ask for samples: then a pod that does not know the job has lost it.
        """
        async with self._registering:
            known = self.jobs.get(spec.name)
            created = known is None
            if known is None and begun:
                raise self._lost(spec.name)
            if known is None:
                known = await self._create(spec, incarnation or uuid.uuid4().hex)
                self.jobs[spec.name] = known
                log.info(
                    "job %s: %s, %d abstract chunks of %d samples, group size %d",
                    spec.name,
                    spec.dataset,
                    known.job.mapping.num_abstract_chunks,
                    known.job.layout.chunk_size,
                    known.job.mapping.group_size,
                )
        if differences := known.job.spec.differences(spec):
            raise JobConflict(
                f"job {spec.name} was registered before with other settings ({'; '.join(differences)}): "
                "use another name, or end that job first",
                differences=differences,
            )
        if incarnation and known.job.incarnation != incarnation:
            raise self._lost(spec.name)
        info = known.job.info() | {"begun": known.owner.begun, "created": created}
        if fingerprint and info["fingerprint"] != fingerprint:
            raise JobConflict(
                f"dataset {spec.dataset} was replaced while job {spec.name} ran: pods read different versions; "
                f"end the job on all pods (DELETE /v1/jobs/{spec.name}), then start it anew"
            )
        known.job.last_used = time.monotonic()
        return info

    def job(self, name: str, incarnation: str | None = None, *, looked_at: bool = False) -> JobAtPod:
        """Raises :class:`UnknownJob`, or :class:`JobLost` when the asker means an earlier registration.

        :param looked_at: by somebody who watches, which does not keep an idle job alive.
        """
        at_pod = self.jobs.get(name)
        if at_pod is None:
            raise UnknownJob(f"pod {self.settings.ordinal} knows no job {name}: register it first", job=name)
        if incarnation is not None and incarnation != at_pod.job.incarnation:
            raise JobLost(
                f"job {name} was ended or lost by the pods and was registered again since: its epoch can't go on with "
                "every sample exactly once; end the job and start it anew, or use another name",
                job=name,
            )
        if not looked_at:
            at_pod.job.last_used = time.monotonic()
        return at_pod

    async def remove(self, name: str) -> bool:
        """End a job on this pod and free its memory; False when there is none."""
        at_pod = self.jobs.pop(name, None)
        if at_pod is None:
            return False
        await at_pod.home.close()
        await at_pod.owner.close()
        await at_pod.job.dataset.close()
        self.pinned.release(at_pod.pinned)
        return True

    async def remove_everywhere(self, name: str) -> bool:
        others = [pod for pod in range(self.settings.num_pods) if pod != self.settings.ordinal]
        removed = await self.peers.call_all(others, "DELETE", f"/peer/v1/jobs/{name}", None)
        return await self.remove(name) or any(answer["removed"] for answer in removed)

    async def _create(self, spec: JobSpec, incarnation: str) -> JobAtPod:
        settings = self.settings
        dataset = await self.opening.take(spec.dataset)
        try:
            memory_bytes = self._memory_for(spec)
            layout = ChunkLayout(dataset.blobs.first_sample, spec.chunk_size or _chunk_size(spec, dataset))
            share = layout.share(settings.ordinal, settings.num_pods)
            records = await dataset.load_records(share.first_sample, share.end_sample)
            remote_bytes = int(memory_bytes * settings.remote_memory_fraction) if settings.num_pods > 1 else 0
            recent_bytes = int(memory_bytes * settings.recent_fraction)
            in_flight_bytes = int(memory_bytes * settings.in_flight_fraction)
            job = Job(
                spec,
                dataset,
                records,
                layout,
                ordinal=settings.ordinal,
                num_pods=settings.num_pods,
                memory_bytes=memory_bytes,
                abstract_bytes=memory_bytes - remote_bytes - recent_bytes - in_flight_bytes,
                incarnation=incarnation,
            )
            pinned = self.pinned.lease(dataset.index.fingerprint, records)
        except BaseException:
            await dataset.close()
            raise
        owner = Owner(job, self.gate, pinned, recent_bytes, settings.wait_seconds)
        return JobAtPod(job, owner, Home(job, owner, self.peers, remote_bytes, settings.wait_seconds), pinned)

    async def _open_dataset(self, url: str) -> Dataset:
        store, kept = self._stores.get(url)
        try:
            return await Dataset.open(url, store=store, owns_store=not kept)
        except BaseException:
            self._stores.forget(url)
            raise

    def _lost(self, name: str) -> JobLost:
        return JobLost(
            f"a pod has lost job {name}, which had begun, and was asked to go on with it: end the job and start it "
            f"anew (end it on all pods: DELETE /v1/jobs/{name})",
            job=name,
        )

    def _memory_for(self, spec: JobSpec) -> int:
        free = self.free_bytes
        wanted = spec.memory_bytes or int(free * self.settings.job_memory_fraction)
        if wanted > free or wanted == 0:
            taken = ", ".join(f"{name} {at_pod.job.memory_bytes:,}" for name, at_pod in self.jobs.items())
            raise MemoryTooSmall(
                f"memory too small: job {spec.name} wants {wanted:,} bytes and pod {self.settings.ordinal} has "
                f"{free:,} of {self.settings.memory_bytes:,} free (pinned: {self.pinned.memory_bytes:,}; "
                f"taken: {taken or 'none'})",
                pod=self.settings.ordinal,
            )
        return wanted

    async def _remove_idle_jobs(self) -> None:
        idle_seconds = self.settings.job_idle_seconds
        while True:
            await asyncio.sleep(min(10.0, idle_seconds / 4))
            now = time.monotonic()
            for name in [n for n, at_pod in self.jobs.items() if now - at_pod.job.last_used > idle_seconds]:
                log.info("job %s: nobody asked for %.0f s, removed", name, idle_seconds)
                await self.remove(name)


def _chunk_size(spec: JobSpec, dataset: Dataset) -> int:
    sample_bytes = dataset.index.sample_bytes / max(1, dataset.num_samples)
    return default_chunk_size(
        spec.policy, dataset.num_samples, sample_bytes, int(np.diff(dataset.blobs.first_sample).max(initial=1))
    )
