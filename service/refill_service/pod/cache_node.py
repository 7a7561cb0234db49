"""What is a pod, without its servers? Its memory, its table of jobs, and how jobs come into it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from urllib.parse import quote, urlencode

from prometheus_client import Histogram

from refill.errors import RefillError
from refill.pods.credentials import ShownToken
from refill_service.cache_core.admission import check_holder
from refill_service.cache_core.shared_room import SharedRoom
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.early_opening import EarlyOpening
from refill_service.datasets.index_room import IndexRoom
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.jobs.job_table import JobTable
from refill_service.membership.live_jobs import LiveJobs
from refill_service.membership.runs import Runs
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.pinned_tier import PinnedTier
from refill_service.object_store.base import ObjectStore
from refill_service.object_store.open_store import WarmStores
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings
from refill_service.peers.peers import Peers
from refill_service.planned.planned_job import PlannedJob
from refill_service.planned.planned_jobs import PlannedJobs
from refill_service.planned.pods_away import PodsAway, is_away
from refill_service.settings import Settings

log = logging.getLogger(__name__)

_FIRST_READS_BYTES = 1 << 20
"""In flight at first: some 10 ms of a 100 MB/s store, times the pods. It is filled after a few round trips."""
_LEAST_READ_BYTES = 256 << 10
"""That a read counts as in its job's turns: about what comes in the time that a read takes which brings nothing."""

_BODIES_PART = 50
_LEAST_BODY_BYTES = 16 << 20
"""Requests hold little: 8 bytes for each position that they name."""
_MOST_OF_FREE = 4
"""A job alone may fill four fifths of what may be sent at once."""
_SHARE_EVERY_SECONDS = 1.0


class CacheNode:
    """A cache pod without its servers: its jobs, its memory, the other pods, its store.

    :param teams: those that share it; none where everybody is nobody's team.
    :param peers: the other pods; None: as the settings say.
    """

    def __init__(
        self,
        settings: Settings,
        teams: Callable[[], Collection[str]] = tuple,
        peers: Peers | None = None,
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
        peer_token = ShownToken(Path(settings.peer_token)) if settings.peer_token else None
        bodies_bytes = max(_LEAST_BODY_BYTES, settings.memory_bytes // _BODIES_PART)
        self.peers = peers or Peers(
            settings.peer_urls,
            settings.peer_timeout_seconds,
            peer_token,
            settings.peer_certificates,
            connect_timeout_seconds=settings.peer_connect_timeout_seconds,
            most_answers_bytes=bodies_bytes,
        )
        self.pinned = PinnedTier(
            settings.pod_memory.pinned_bytes,
            Path(settings.pinned_dir) if settings.pinned_dir else None,
            settings.pinned_dir_bytes,
        )
        for_jobs_bytes = settings.memory_bytes - self.pinned.memory_bytes
        store_settings = StoreSettings.from_environment()
        self.gate = ByteGate(
            int(for_jobs_bytes * settings.in_flight_fraction),
            _FIRST_READS_BYTES,
            limit_visitors=store_settings.max_connections,
            least_bytes=_LEAST_READ_BYTES,
        )
        limit_bytes = settings.sending_limit_bytes // (2 if settings.num_pods > 1 else 1)
        self.sending_to_clients = ByteGate(limit_bytes, most_of_free=_MOST_OF_FREE)
        self.sending_to_pods = ByteGate(limit_bytes, most_of_free=_MOST_OF_FREE)
        """Apart from clients' answers, which wait for those of other pods: two could wait for each other."""
        self.bodies = SharedRoom(bodies_bytes)
        """Of clients' requests."""
        self.bodies_of_pods = SharedRoom(bodies_bytes, one_may_be_larger=True)
        """Of other pods' requests, which may be as large as a trace of one of their ranks."""
        self.requests = RequestCounts()
        self.peer_bytes_sent: Counter[int] = Counter()
        self._stores = WarmStores(store_settings, self.store_counters)
        self.index_room = IndexRoom(settings.memory_bytes)
        self.opening = EarlyOpening(self._open_dataset)
        planned: dict[str, PlannedJob] = {}
        self.table = JobTable(settings, self.quotas, self.peers, self.gate, self.pinned, self.opening, planned)
        self.pods_away = PodsAway(self.peers)
        self.planned = PlannedJobs(planned, self.table, self.peers, self.pods_away)
        self.runs = Runs(self.table, self.peers)
        self.live = LiveJobs(self.table, self.peers)
        self._phase = PodPhase.STARTING
        self._cleaner: asyncio.Task[None] | None = None
        self._sharer: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._cleaner = asyncio.create_task(self._remove_idle_jobs())
        self._sharer = asyncio.create_task(self._share_memory())

    async def close(self) -> None:
        for task in (self._cleaner, self._sharer):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.table.goodbyes.close()
        await self.live.close()
        await self.pods_away.close()
        await self.planned.close()
        for name, at_pod in list(self.jobs.items()):
            try:
                await self.table.close_job(at_pod, self.table.stopping())
            except Exception as error:  # the others are to be closed, too
                _say(f"job {name} was not closed in order", error)
        self.jobs.clear()
        await self.opening.close()
        await self.peers.close()
        self.pinned.close()

    @property
    def jobs(self) -> dict[str, JobAtPod]:
        return self.table.jobs

    async def end(self, name: str, holder: str) -> tuple[bool, list[int]]:
        """A client ends a job, live or planned, on all pods that are there. Returns whether any had it, and the pods
        that are away: one that was not restarted meanwhile still has it. Raises :class:`NotAllowed` for one of another
        token."""
        path = f"/peer/v1/jobs/{quote(name, safe='')}?{urlencode({'holder': holder})}"
        others = self.settings.other_pods
        told = (self.pods_away.answer_of(pod, self.peers.call(pod, "DELETE", path)) for pod in others)
        answers = await asyncio.gather(*told, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not is_away(answer):
                raise answer
        removed = [answer["removed"] for answer in answers if not isinstance(answer, BaseException)]
        away = [pod for pod, answer in zip(others, answers, strict=True) if isinstance(answer, BaseException)]
        return await self.end_here(name, holder) or any(removed), away

    async def end_here(self, name: str, holder: str) -> bool:
        """On this pod alone; as :meth:`end`."""
        if name not in self.planned.jobs:
            return await self.table.remove(name, holder)
        check_holder(name, self.planned.jobs[name].spec.holder, holder)
        await self.planned.end_here(name)
        return True

    @property
    def phase(self) -> PodPhase:
        return self._phase

    @phase.setter
    def phase(self, phase: PodPhase) -> None:
        self._phase = phase
        self.table.takes_jobs = phase is not PodPhase.STOPPING

    async def _open_dataset(self, url: str, version: str) -> Dataset:
        opened: list[str] = []

        def open_place(place: str) -> tuple[ObjectStore, bool]:
            # Whoever it came from: a client, an index, or another pod, which has other settings perhaps.
            may_read = self.settings.check_data if opened else self.settings.check_dataset
            store, kept = self._stores.get(place, may_read(place))
            opened.append(place)
            return store, not kept

        try:
            return await Dataset.open(url, open_place=open_place, room=self.index_room, version=version)
        except BaseException:
            for place in opened:
                self._stores.forget(place)
            raise

    async def _share_memory(self) -> None:
        """What jobs give back goes to others soon, and what those leave that fall asleep."""
        while True:
            await asyncio.sleep(_SHARE_EVERY_SECONDS)
            try:
                self.table.share_memory()
            except Exception as error:  # the next round may do better
                _say("memory was not shared anew", error)

    async def _remove_idle_jobs(self) -> None:
        idle_seconds = self.settings.job_idle_seconds
        while True:
            await asyncio.sleep(min(10.0, idle_seconds / 4))
            try:
                await self.planned.remove_idle(idle_seconds)
                await self.live.remove_idle()
            except Exception as error:  # it is tried again
                _say("idle jobs were not removed", error)


def _say(what: str, error: Exception) -> None:
    """An answer to a client is no failure of the pod: a log needs no traceback of it."""
    log.error("%s: %s", what, error, exc_info=not (isinstance(error, RefillError) and error.status < 500))


class PodPhase(Enum):
    """How far a pod is between its start and its end."""

    STARTING = "starting"
    """Its servers do not all listen yet."""
    READY = "ready"
    STOPPING = "stopping"
    """It was told to end: jobs that it has go on for a while, new ones are refused."""


@dataclass
class RequestCounts:
    """What is counted of the requests to a pod."""

    under_way: Counter[str] = field(default_factory=Counter)
    """Of ``client``s and of other ``pod``s, without probes."""
    by_status: Counter[int] = field(default_factory=Counter)
    """Answers from 400 on; those to probes are none."""
    connections_cut: int = 0
    """Of clients that sent or read too slowly."""
