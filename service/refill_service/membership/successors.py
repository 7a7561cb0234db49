"""What does a pod do for others that end and are started again? It keeps what they hand over, and gives it back.

So pods that are replaced one after another, without volumes, keep their jobs even while no rank is there: each finds
its jobs again as soon as it has started, before the next one ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial

from refill.errors import PodRecovering, PodUnreachable, RefillError, UnknownJob
from refill.protocol.records import encode_records
from refill_service.cache_core.job_lifecycle import Phase
from refill_service.cache_core.pod_lives import PodLives
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.jobs.job_table import JobTable
from refill_service.membership.jobs_here import JobsHere
from refill_service.peers.peers import Peers

__all__ = ["Successors"]

log = logging.getLogger(__name__)

_HAND_OVER_SECONDS = 2.0
_PAUSE_SECONDS = 0.25


class Successors:
    """Of the jobs of one pod."""

    def __init__(self, table: JobTable, peers: Peers, here: JobsHere, lives: PodLives) -> None:
        self._table = table
        self._peers = peers
        self._here = here
        self._lives = lives
        self._introducing: dict[tuple[int, str], asyncio.Task[None]] = {}

    def came(self, pod: int, run: str) -> None:
        """Fact: another pod has started. It takes up the jobs of which its run before has left records here."""
        for name, at_pod in self._table.jobs.items():
            if at_pod.records.started(pod, run) and (pod, name) not in self._introducing:
                task = asyncio.create_task(self._introduce(pod, run, at_pod))
                self._introducing[pod, name] = task
                task.add_done_callback(partial(self._is_done, (pod, name)))

    def _is_done(self, key: tuple[int, str], task: asyncio.Task[None]) -> None:
        self._introducing.pop(key, None)

    async def close(self) -> None:
        tasks = list(self._introducing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _introduce(self, pod: int, run: str, at_pod: JobAtPod) -> None:
        name = at_pod.job.spec.name
        while self._table.jobs.get(name) is at_pod and self._is_newest(pod, run):
            try:
                await self._here.introduce(pod, at_pod)
                return
            except (PodUnreachable, PodRecovering):
                await asyncio.sleep(_PAUSE_SECONDS)  # it has just started
            except RefillError as error:
                log.info("pod %d does not take up job %s, of which it has left records here: %s", pod, name, error)
                return

    def _is_newest(self, pod: int, run: str) -> bool:
        newest = self._lives.newest(pod)
        return newest is not None and newest.name == run

    async def hand_over(self, at_pod: JobAtPod, phase: Phase) -> None:
        """Leave with another pod what this one has answered, and what others that have ended have left here.

        :param phase: of the job before it was closed.
        """
        owner, own = at_pod.owner, at_pod.job.ordinal
        left = at_pod.records.unclaimed
        if phase is Phase.RUNNING:
            left[own] = encode_records(record for epoch in owner.epochs_to_keep for record in owner.snapshot(epoch))
        for of_pod, records in left.items():
            for pod in at_pod.peers.others:
                if pod == of_pod:
                    continue
                with contextlib.suppress(RefillError, TimeoutError, OSError):
                    if of_pod == own and owner.journal is not None:
                        owner.journal.hands_over_to(pod)
                    async with asyncio.timeout(_HAND_OVER_SECONDS):
                        await self._give(pod, at_pod, of_pod, records)
                        break
            else:
                if at_pod.peers.others:
                    log.warning("job %s: no pod takes what pod %d had delivered", at_pod.job.spec.name, of_pod)

    async def _give(self, pod: int, at_pod: JobAtPod, of_pod: int, records: bytes) -> None:
        ended = self._lives.own if of_pod == at_pod.job.ordinal else self._lives.newest(of_pod)
        path = at_pod.peers.path("kept") + f"&of={of_pod}&run={'' if ended is None else ended.name}"
        try:
            await self._peers.call(pod, "PUT", path, records)
        except UnknownJob:
            await self._here.introduce(pod, at_pod)
            await self._peers.call(pod, "PUT", path, records)
