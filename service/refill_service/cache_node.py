"""Which jobs does this pod serve, and with how much memory? Registers, looks up, counts and removes jobs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from prometheus_client import Histogram

from refill.errors import (
    InvalidInput,
    JobConflict,
    JobError,
    JobLost,
    MemoryTooSmall,
    PodStopping,
    PodUnreachable,
    RefillError,
    UnknownJob,
)
from refill.protocol.job_spec import JobSpec
from refill.protocol.records import Kind, Record, encode_records
from refill.protocol.wire_format import BatchRequest, Int64Array
from refill_service.byte_gate import ByteGate
from refill_service.cache_core.owner_epoch import EpochCounts
from refill_service.cache_core.receipt import EpochReceipt, sum_of_receipts
from refill_service.cache_core.resumed_epoch import ResumedEpoch, decode_resumed, is_resumed
from refill_service.cache_core.sample_mapping import ChunkLayout, default_chunk_size
from refill_service.client_memory import ClientMemory
from refill_service.datasets.dataset_reader import Dataset
from refill_service.early_opening import EarlyOpening
from refill_service.home import Home, HomeCounts
from refill_service.job import Job
from refill_service.job_peers import JobPeers
from refill_service.journal import Journal, KeptJob
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings
from refill_service.object_store.warm_stores import WarmStores
from refill_service.owner import Owner
from refill_service.peers import Peers
from refill_service.pinned_tier import PinnedShare, PinnedTier
from refill_service.pod_phase import PodPhase
from refill_service.recovery import Recovery
from refill_service.request_guard import BodyBytes, Refusals
from refill_service.running_epoch import OwnerCounts
from refill_service.settings import Settings

__all__ = ["CacheNode", "ClientCounts", "JobAtPod"]

log = logging.getLogger(__name__)

_FIRST_READS_BYTES = 1 << 20
"""In flight at first: some 10 ms of a 100 MB/s store, times the pods. It is filled after a few round trips."""

_CLIENT_MEMORY_FRACTION = 0.05
_BODIES_PART = 50
_LEAST_BODY_BYTES = 16 << 20
"""Requests hold little: 8 bytes for each position that they name."""
_MOST_OF_FREE = 4
"""A job alone may fill four fifths of what may be sent at once."""
_KEPT_RECEIPTS = 1000
_LONG_IDLE_SECONDS = 1e12
_HAND_OVER_SECONDS = 2.0
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
class LeftByPod:
    """What a pod left here when it ended, for its successor."""

    records: bytes
    claimed_by: str = ""
    """The run of the pod that came for it. It may have delivered more since, so a later one finds it incomplete."""


@dataclass
class JobAtPod:
    """A job here: what it is, the pod as its owner, the pod as the home of ranks."""

    job: Job
    owner: Owner
    home: Home
    peers: JobPeers
    pinned: PinnedShare
    recovery: asyncio.Task[None] | None = None
    """After a restart of the pod, while it learns from others what it had delivered."""
    kept: dict[int, LeftByPod] = field(default_factory=dict)
    """By the ordinals of pods that ended in order."""
    ended: dict[int, dict[str, Any]] = field(default_factory=dict)
    """This pod's part of the receipts of epochs that will not be asked for again."""
    clients: dict[int, ClientCounts] = field(default_factory=dict)
    requests_under_way: int = 0

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """For the time of a request, which may wait for longer than a job may be idle."""
        self.requests_under_way += 1
        try:
            yield
        finally:
            self.requests_under_way -= 1
            self.job.last_used = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Since somebody asked for anything here, other than to look."""
        return 0.0 if self.requests_under_way else time.monotonic() - self.job.last_used

    def client(self, rank: int) -> ClientCounts:
        self.job.check_rank(rank)
        return self.clients.setdefault(rank, ClientCounts())

    def told(self, pod: int, life: str) -> bytes:
        """Records for a pod that was restarted: what it left here, and what this one knows as a home and as an owner.

        :param life: tells this run of the pod from another one.
        """
        records = [*self.home.told(pod), *self.owner.opened()]
        for epoch in self.job.traced_epochs:
            records += self.job.trace_records(epoch)
        if not self.owner.lost:
            records.append(Record(Kind.ALL_RANKS, 0))
        if (left := self.kept.get(pod)) is None:
            return encode_records(records)
        left.claimed_by = left.claimed_by or life
        if left.claimed_by == life:
            records.append(Record(Kind.WHOLE_TABLE, 0))
        return left.records + encode_records(records)

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

    async def receipt(self, epoch: int) -> dict[str, Any]:
        """What an epoch delivered, over all pods: ``EpochReceipt`` as JSON, with what it is the receipt of.

        Samples that were sent ahead and never asked for were not delivered.
        """
        here = await self.receipt_here(epoch)
        answers = [here, *await self.peers.call_all("GET", f"epochs/{epoch}/receipt")]
        total = sum_of_receipts([EpochReceipt.from_dict(answer["receipt"]) for answer in answers])
        for answer in answers:
            total = total.without({int(rank): count for rank, count in answer["unused_ahead"].items()})
        spec, resumed = self.job.spec, self.job.resumed
        if resumed is not None and resumed.epoch == epoch:
            total = replace(total.with_done(resumed.done), unknown=total.unknown + resumed.unknown)
        of_what = {"job": spec.name, "epoch": epoch, "seed": spec.seed, "policy": spec.policy}
        running = epoch >= self.owner.epoch and not total.exact
        return of_what | {"running": running, "repeats": sum(answer["repeats"] for answer in answers)} | total.to_dict()

    async def receipt_here(self, epoch: int) -> dict[str, Any]:
        """This pod's part of it: of its share, and of what other pods sent it ahead."""
        if epoch in self.ended:
            return self.ended[epoch]
        return {
            "epoch": epoch,
            "receipt": (await self.owner.receipt(epoch)).to_dict(),
            "unused_ahead": {str(rank): count for rank, count in self.home.unused_ahead(epoch).items()},
            "repeats": self.home.history[epoch].repeats if epoch in self.home.history else 0,
        }

    async def epoch_ended(self, epoch: int) -> None:
        """Its part of the receipt is final."""
        self.ended[epoch] = await self.receipt_here(epoch)
        while len(self.ended) > _KEPT_RECEIPTS:
            self.ended.pop(next(iter(self.ended)))
        if self.owner.journal is not None:
            self.owner.journal.keep_receipt(self.ended[epoch])

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
        self.journal = Journal(
            Path(settings.journal_dir) if settings.journal_dir else None, settings.journal_sync_seconds
        )
        for_jobs = settings.memory_bytes - self.pinned.memory_bytes
        self.gate = ByteGate(int(for_jobs * settings.in_flight_fraction), _FIRST_READS_BYTES)
        limit_bytes = settings.sending_limit_bytes // (2 if settings.num_pods > 1 else 1)
        self.sending_to_clients = ByteGate(limit_bytes, most_of_free=_MOST_OF_FREE)
        self.sending_to_pods = ByteGate(limit_bytes, most_of_free=_MOST_OF_FREE)
        """Apart from clients' answers, which wait for those of other pods: two could wait for each other."""
        self.phase = PodPhase.STARTING
        self.refusals = Refusals()
        self.bodies = BodyBytes(max(_LEAST_BODY_BYTES, settings.memory_bytes // _BODIES_PART))
        self.jobs: dict[str, JobAtPod] = {}
        self.peer_bytes_sent: dict[int, int] = {}
        self._stores = WarmStores(store_settings or StoreSettings.from_environment(), self.store_counters)
        self.opening = EarlyOpening(self._open_dataset)
        self._registering = asyncio.Lock()
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
        for at_pod in self.jobs.values():
            await self._close(at_pod, self.stopping())
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
            with contextlib.suppress(RefillError, TimeoutError):
                async with asyncio.timeout(_HAND_OVER_SECONDS):
                    await self.peers.call(pod, "PUT", at_pod.peers.path("kept"), body)
                    return

    @property
    def free_bytes(self) -> int:
        for_jobs = self.settings.memory_bytes - self.pinned.memory_bytes
        return for_jobs - sum(at_pod.job.memory_bytes for at_pod in self.jobs.values())

    async def register(self, spec: JobSpec, incarnation: str | None = None) -> dict[str, Any]:
        """Register a job on every pod; registering it again with the same settings changes nothing.

        :param incarnation: of a client that has the job already: this pod was restarted, and takes it up again. The
            others need not be there for that.
        """
        if spec.name in self.jobs:
            return await self._register(spec)
        self._take_new_jobs()
        self.opening.begin(spec.dataset)
        if incarnation is not None:
            return await self.register_here(spec, incarnation, "", begun=True) | {"pods": list(self.settings.pod_urls)}
        telling = asyncio.create_task(self._tell_others(spec))
        try:
            return await self._register(spec)
        finally:
            await telling

    async def _tell_others(self, spec: JobSpec) -> None:
        """That they may open the dataset; what is wrong with them is found when they are to register the job."""
        with contextlib.suppress(RefillError):
            body = {"dataset": spec.dataset}
            await self.peers.call_all(self._others, "POST", f"/peer/v1/jobs/{spec.name}/opening", body)

    async def _register(self, spec: JobSpec) -> dict[str, Any]:
        ordinal, path = self.settings.ordinal, f"/peer/v1/jobs/{spec.name}"
        leader: dict[str, Any] = {"incarnation": "", "fingerprint": "", "begun": False, "created": False}
        if ordinal != _LEADER:
            leader = await self.peers.call(_LEADER, "PUT", path, {"spec": spec.to_dict()})
        created = leader["created"]
        try:
            info = await self.register_here(spec, leader["incarnation"], leader["fingerprint"], begun=leader["begun"])
            created = created or info.pop("created")
            body = {
                "spec": spec.to_dict(),
                "incarnation": info["incarnation"],
                "fingerprint": info["fingerprint"],
                "begun": leader["begun"] or info["begun"],
            }
            others = [pod for pod in self._others if pod != _LEADER]
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

        :param incarnation: as another pod or a client names it; empty: whatever it is here, a new one if need be.
        :param fingerprint: of the dataset as another pod read it; empty: any.
        :param begun: whether ranks were seen to ask for samples: then a pod that does not know the job has lost it.
        """
        async with self._registering:
            known = self.jobs.get(spec.name)
            created = known is None
            if known is None:
                known = await self._create_or_take_up(spec, incarnation, begun)
        if differences := known.job.spec.differences(spec):
            raise JobConflict(
                f"job {spec.name} was registered before with other settings ({'; '.join(differences)}): "
                "use another name, or end that job first",
                differences=differences,
            )
        if incarnation and known.job.incarnation != incarnation:
            raise self._is_another(spec.name)
        info = known.job.info() | {"begun": known.owner.begun or known.recovery is not None, "created": created}
        if fingerprint and info["fingerprint"] != fingerprint:
            raise self._replaced(spec)
        known.job.last_used = time.monotonic()
        return info

    async def _create_or_take_up(self, spec: JobSpec, incarnation: str, begun: bool) -> JobAtPod:
        """A job that this pod does not have: a new one, or one that it lost in a restart."""
        if self.journal.has_ended(incarnation):
            raise JobLost(f"job {spec.name} was ended: end what is left of it, or use another name", job=spec.name)
        kept = self.journal.find(spec.name)
        if kept is not None and incarnation not in ("", kept.header["incarnation"]):
            kept = None  # of an earlier job of that name
        if kept is None and not incarnation and self.settings.ordinal == _LEADER:
            incarnation, begun = await self.known_to_others(spec.name)
        if kept is not None:
            incarnation = kept.header["incarnation"]
            if kept.header["num_pods"] != self.settings.num_pods:
                raise self._moved(spec.name, kept.header["num_pods"])
            if differences := JobSpec.from_dict(kept.header["spec"]).differences(spec):
                raise JobConflict(
                    f"job {spec.name} ran before with other settings ({'; '.join(differences)}): use another name, or "
                    "end that job first",
                    differences=differences,
                )
        lost = kept is not None or begun
        resumed = None if kept is None else kept.resumed
        if resumed is None and is_resumed(incarnation):
            resumed = await self._resumed_at_others(spec.name, incarnation)
        at_pod = await self._create(spec, incarnation or uuid.uuid4().hex, kept, resumed, lost=lost)
        try:
            if kept is not None and kept.header["fingerprint"] != at_pod.job.info()["fingerprint"]:
                raise self._replaced(spec)
            if lost:
                self._take_up(at_pod, kept)
            else:
                self._begin_journal(at_pod)
        except BaseException:
            await self._close(at_pod, self._gone(spec.name))
            raise
        self.jobs[spec.name] = at_pod
        job = at_pod.job
        log.info(
            "job %s: %s, %d abstract chunks of %d samples, group size %d%s",
            spec.name,
            spec.dataset,
            job.mapping.num_abstract_chunks,
            job.layout.chunk_size,
            job.mapping.group_size,
            ", taken up after a restart" if lost else "",
        )
        return at_pod

    async def known_to_others(self, name: str) -> tuple[str, bool]:
        """``(incarnation, begun)`` of a job that another pod knows; ``("", False)`` when none does."""
        path = f"/peer/v1/jobs/{name}"
        asked = (self.peers.call(pod, "GET", path) for pod in self._others)
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, dict):
                return answer["incarnation"], answer["begun"]
            if isinstance(answer, PodUnreachable) or not isinstance(answer, RefillError):
                raise answer  # it may know the job
        return "", False

    async def register_resumed(self, spec: JobSpec, incarnation: str, resumed: ResumedEpoch) -> dict[str, Any]:
        """Register a job as it goes on from a checkpoint, in place of what it was before, on every pod."""
        await self.replace_here(spec, incarnation, resumed)
        body = {"spec": spec.to_dict(), "incarnation": incarnation}
        await self.peers.call_all(self._others, "PUT", f"/peer/v1/jobs/{spec.name}/resumed", body)
        return await self._register(spec)

    async def replace_here(self, spec: JobSpec, incarnation: str, resumed: ResumedEpoch | None = None) -> None:
        """:param resumed: None: pod 0 has it."""
        async with self._registering:
            known = self.jobs.get(spec.name)
            if known is not None and known.job.incarnation == incarnation:
                return
            if resumed is None:
                resumed = await self._resumed_at(_LEADER, spec.name, incarnation)
            await self.remove(spec.name)
            at_pod = await self._create(spec, incarnation, None, resumed, lost=False)
            self._begin_journal(at_pod)
            self.jobs[spec.name] = at_pod
            log.info("job %s goes on in epoch %d with %d ranks", spec.name, resumed.epoch, spec.world_size)

    async def _resumed_at_others(self, name: str, incarnation: str) -> ResumedEpoch:
        for pod in self._others:
            with contextlib.suppress(JobError):
                return await self._resumed_at(pod, name, incarnation)
        raise JobLost(
            f"job {name} had been resumed from a checkpoint, and no pod knows any more from which: resume it again",
            job=name,
        )

    async def _resumed_at(self, pod: int, name: str, incarnation: str) -> ResumedEpoch:
        path = f"/peer/v1/jobs/{name}/resumed"
        return decode_resumed(await self.peers.get_bytes(pod, f"{path}?incarnation={quote(incarnation, safe='')}"))

    def known(self, name: str) -> dict[str, Any]:
        """What this pod knows of a job, be it from before a restart. Raises :class:`UnknownJob`."""
        if name not in self.jobs and (kept := self.journal.find(name)) is not None:
            return {"incarnation": kept.header["incarnation"], "begun": True, "idle_seconds": _LONG_IDLE_SECONDS}
        at_pod = self.job(name, looked_at=True)
        return {
            "incarnation": at_pod.job.incarnation,
            "begun": at_pod.owner.begun or at_pod.recovery is not None,
            "idle_seconds": at_pod.idle_seconds,
        }

    def _take_up(self, at_pod: JobAtPod, kept: KeptJob | None) -> None:
        if kept is not None:
            at_pod.ended |= kept.receipts
        recovery = Recovery(
            at_pod.job,
            at_pod.owner,
            at_pod.home,
            at_pod.peers,
            kept,
            self.settings.recovery_seconds,
            lambda pod: self._introduce(pod, at_pod.job),
        )
        if recovery.from_journal():
            self._begin_journal(at_pod)
        else:
            at_pod.recovery = asyncio.create_task(self._recover(at_pod, recovery))

    async def _recover(self, at_pod: JobAtPod, recovery: Recovery) -> None:
        name = at_pod.job.spec.name
        try:
            await recovery.from_others(lambda: self._begin_journal(at_pod))
        except Exception as error:
            log.error("job %s can't go on after a restart of this pod: %s", name, error, exc_info=not _expected(error))
            at_pod.recovery = None
            if self.jobs.get(name) is at_pod:
                await self.remove(name)

    def _begin_journal(self, at_pod: JobAtPod) -> None:
        """Not before all is known that is to be in it: what a journal lacks was never delivered."""
        job = at_pod.job
        header = {
            "spec": job.spec.to_dict(),
            "incarnation": job.incarnation,
            "fingerprint": job.info()["fingerprint"],
            "memory_bytes": job.memory_bytes,
            "num_pods": job.num_pods,
            "num_samples": job.layout.num_samples,
        }
        at_pod.owner.journal = self.journal.begin(
            job.spec.name, header, at_pod.owner.snapshot, at_pod.owner.live_epochs, job.resumed
        )

    async def _introduce(self, pod: int, job: Job) -> None:
        """Tell a pod of a job that it lost in a restart."""
        body = {
            "spec": job.spec.to_dict(),
            "incarnation": job.incarnation,
            "fingerprint": job.info()["fingerprint"],
            "begun": True,
        }
        await self.peers.call(pod, "PUT", f"/peer/v1/jobs/{job.spec.name}", body)

    def job(self, name: str, incarnation: str | None = None, *, looked_at: bool = False) -> JobAtPod:
        """Raises :class:`UnknownJob`, or :class:`JobLost` when the asker means an earlier registration.

        :param looked_at: by somebody who watches, which does not keep an idle job alive.
        """
        at_pod = self.jobs.get(name)
        if at_pod is None:
            raise UnknownJob(f"pod {self.settings.ordinal} knows no job {name}: register it first", job=name)
        if incarnation is not None and incarnation != at_pod.job.incarnation:
            raise self._is_another(name)
        if not looked_at:
            at_pod.job.last_used = time.monotonic()
        return at_pod

    async def remove(self, name: str) -> bool:
        """End a job on this pod, free its memory and forget what it delivered; False when there is none."""
        at_pod = self.jobs.pop(name, None)
        if at_pod is None:
            kept = self.journal.find(name)
            if kept is not None:
                self.journal.end(name, kept.header["incarnation"])
            return kept is not None
        self.journal.end(name, at_pod.job.incarnation)
        await self._close(at_pod, self._gone(name))
        return True

    async def _close(self, at_pod: JobAtPod, why: RefillError) -> None:
        """Requests under way end with ``why``."""
        if at_pod.recovery is not None:
            at_pod.recovery.cancel()
            await asyncio.gather(at_pod.recovery, return_exceptions=True)
        await at_pod.home.close(why)
        await at_pod.owner.close(why)
        await at_pod.job.dataset.close()
        self.pinned.release(at_pod.pinned)

    async def remove_everywhere(self, name: str) -> bool:
        removed = await self.peers.call_all(self._others, "DELETE", f"/peer/v1/jobs/{name}", None)
        return await self.remove(name) or any(answer["removed"] for answer in removed)

    @property
    def _others(self) -> list[int]:
        return [pod for pod in range(self.settings.num_pods) if pod != self.settings.ordinal]

    async def _create(
        self, spec: JobSpec, incarnation: str, kept: KeptJob | None, resumed: ResumedEpoch | None, *, lost: bool
    ) -> JobAtPod:
        settings = self.settings
        self._take_new_jobs()
        dataset = await self.opening.take(spec.dataset)
        try:
            memory_bytes = self._memory_for(spec, 0 if kept is None else kept.header["memory_bytes"])
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
                resumed=resumed,
            )
            pinned = self.pinned.lease(dataset.index.fingerprint, records)
        except BaseException:
            await dataset.close()
            raise
        owner = Owner(job, self.gate, pinned, recent_bytes, settings.wait_seconds, lost=lost)
        peers = JobPeers(job, self.peers, settings.wait_seconds, lambda pod: self._introduce(pod, job))
        home = Home(job, owner, peers, remote_bytes, settings.wait_seconds, lost=lost)
        at_pod = JobAtPod(job, owner, home, peers, pinned)
        owner.epoch_ended = at_pod.epoch_ended
        return at_pod

    async def _open_dataset(self, url: str) -> Dataset:
        store, kept = self._stores.get(url)
        try:
            return await Dataset.open(url, store=store, owns_store=not kept)
        except BaseException:
            self._stores.forget(url)
            raise

    def _take_new_jobs(self) -> None:
        if self.phase is PodPhase.STOPPING:
            raise self.stopping()

    def _is_another(self, name: str) -> JobLost:
        return JobLost(
            f"job {name} was ended or lost by the pods and was registered again since: its epoch can't go on with "
            f"every sample exactly once; end the job and start it anew (DELETE /v1/jobs/{name}), or use another name",
            job=name,
        )

    def _moved(self, name: str, num_pods: int) -> JobLost:
        return JobLost(
            f"job {name} ran on {num_pods} pods, and there are {self.settings.num_pods} now: resume it from the state "
            f"of a checkpoint (load_state_dict), or end it (DELETE /v1/jobs/{name}) and start the epoch anew",
            job=name,
        )

    def _gone(self, name: str) -> JobLost:
        return JobLost(f"job {name} was ended while it was asked for samples", job=name)

    def _replaced(self, spec: JobSpec) -> JobConflict:
        return JobConflict(
            f"dataset {spec.dataset} was replaced while job {spec.name} ran: pods read different versions; "
            f"end the job on all pods (DELETE /v1/jobs/{spec.name}), then start it anew"
        )

    def _memory_for(self, spec: JobSpec, kept_bytes: int) -> int:
        free = self.free_bytes
        wanted = kept_bytes or spec.memory_bytes or int(free * self.settings.job_memory_fraction)
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
            for name in [n for n, at_pod in self.jobs.items() if at_pod.idle_seconds > idle_seconds]:
                if await self._idle_everywhere(name) and name in self.jobs:
                    log.info("job %s: nobody asked for %.0f s, removed", name, idle_seconds)
                    await self.remove(name)

    async def _idle_everywhere(self, name: str) -> bool:
        """Whether no pod was asked for the job: one that owns little of it, or sends far ahead, is asked seldom. A pod
        that does not answer may be the one that is in use."""
        path = f"/peer/v1/jobs/{name}"
        answers = await asyncio.gather(
            *(self.peers.call(pod, "GET", path) for pod in self._others), return_exceptions=True
        )
        at_pod, idle_seconds = self.jobs.get(name), self.settings.job_idle_seconds
        return all(
            isinstance(answer, UnknownJob) or (isinstance(answer, dict) and answer["idle_seconds"] > idle_seconds)
            for answer in answers
        ) and (at_pod is not None and at_pod.idle_seconds > idle_seconds)


def _expected(error: Exception) -> bool:
    return isinstance(error, RefillError) and error.status < 500


def _chunk_size(spec: JobSpec, dataset: Dataset) -> int:
    sample_bytes = dataset.index.sample_bytes / max(1, dataset.num_samples)
    return default_chunk_size(
        spec.policy, dataset.num_samples, sample_bytes, int(np.diff(dataset.blobs.first_sample).max(initial=1))
    )
