"""Which token owns a job that this pod does not know, or not any more? The other pods are asked before a client is
believed.

A pod that was restarted without its journal would else give the job's name to the first client that asks, and refuse
the team that trains under it. Where no pod knows a job, the client that names it gets it.
"""

from __future__ import annotations

import asyncio
import time

from refill.errors import PodUnreachable, UnknownJob
from refill.protocol.incarnation import same_line
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.job_holder import check_holder
from refill_service.cache_core.job_lifecycle import KnownJob, is_another, newest_known
from refill_service.jobs.job_table import JobTable
from refill_service.peers.job_peers import PATIENCE_SECONDS
from refill_service.peers.peers import Peers

__all__ = ["WhoHolds"]


class WhoHolds:
    """What other pods know of jobs."""

    def __init__(self, table: JobTable, peers: Peers) -> None:
        self._table = table
        self._peers = peers

    async def check_brought(self, spec: JobSpec, incarnation: str) -> None:
        """Check a client that registers a job again, by a name that the job has had: ask until a pod knows the job, or
        all have answered that they do not. This pod's own journal counts as another pod.

        Raises :class:`NotAllowed` for a job of another token, :class:`JobConflict` for one of other settings,
        :class:`JobLost` for an earlier job of that name, and :class:`PodUnreachable` when a pod that may know better
        does not answer yet.
        """
        kept = self._table.journal.find(spec.name)
        if kept is not None and same_line(kept.header["incarnation"], incarnation):
            check_holder(spec.name, kept.header["spec"].get("holder", ""), spec.holder)
            return
        asking = {asyncio.create_task(self._ask(pod, spec.name)): pod for pod in self._table.settings.other_pods}
        try:
            await self._check_answers(spec, incarnation, asking)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _check_answers(self, spec: JobSpec, incarnation: str, asking: dict[asyncio.Task[KnownJob], int]) -> None:
        """Look at each answer as it comes. One pod that has the job is enough."""
        until, waiting = time.monotonic() + PATIENCE_SECONDS, set(asking)
        silent: list[BaseException] = []
        another = False
        while waiting and (left := until - time.monotonic()) > 0:
            answered, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in answered:
                if (error := task.exception()) is not None:
                    silent += [] if isinstance(error, UnknownJob) else [error]
                    continue
                known = task.result()
                check_holder(spec.name, known.holder, spec.holder)
                if same_line(known.incarnation, incarnation):
                    known.check_settings(spec)
                    return
                another |= known.running and known.knows and known.begun
        if another:
            raise is_another(spec.name)
        if silent:
            raise silent[0]
        if waiting:
            pods = ", ".join(self._peers.name(pod) for pod in sorted(asking[task] for task in waiting))
            raise PodUnreachable(
                f"{pods} can't be asked who holds job {spec.name}: no answer in {PATIENCE_SECONDS:.0f} s"
            )

    async def known_to_others(self, name: str, holder: str) -> KnownJob | None:
        """What another pod knows of a job; None when none does.

        :param holder: the owner of the token that asks. Raises :class:`NotAllowed` when the job is another one's.
        """
        found, silent = await self.known_elsewhere(name, holder)
        if not found and silent:
            raise silent[0]  # that pod may know the job
        return newest_known(found)

    async def known_elsewhere(self, name: str, holder: str) -> tuple[list[KnownJob], list[BaseException]]:
        """What other pods know of a job, and the errors of those that did not answer. A journal of a run that has
        ended, as is known here, is no knowledge: its pod was not there when it ended."""
        asked = (self._ask(pod, name) for pod in self._table.settings.other_pods)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        has_ended = self._table.journal.has_ended
        known = [answer for answer in answers if isinstance(answer, KnownJob)]
        found = [each for each in known if each.running or not has_ended(each.incarnation)]
        for each in found:
            check_holder(name, each.holder, holder)
        return found, [each for each in answers if isinstance(each, BaseException) and not isinstance(each, UnknownJob)]

    async def _ask(self, pod: int, name: str) -> KnownJob:
        return KnownJob.from_dict(await self._peers.call(pod, "GET", f"/peer/v1/jobs/{name}"))
