"""How does a job become known to all pods, and known again to one that was restarted?

A client registers a job at any pod. Pod 0 names its *incarnation*, so that ranks that come at the same time agree; the
others take it from there. :func:`how_to_register` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from urllib.parse import quote

from refill.errors import JobError, RefillError, UnknownJob
from refill.protocol.incarnation import is_later
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.job_lifecycle import Register, how_to_register
from refill_service.jobs.job_table import JobTable
from refill_service.membership.jobs_here import LEADER, JobsHere, journal_found
from refill_service.membership.moving import Moving
from refill_service.membership.who_holds import WhoHolds
from refill_service.peers.peers import Peers

__all__ = ["Registration"]


class Registration:
    """Registers jobs at this pod, and at the others by way of it."""

    def __init__(self, table: JobTable, peers: Peers, who_holds: WhoHolds, here: JobsHere, moving: Moving) -> None:
        self._table = table
        self._settings = table.settings
        self._peers = peers
        self._who_holds = who_holds
        self._here = here
        self._moving = moving

    async def register(
        self, spec: JobSpec, incarnation: str | None = None, num_pods: int | None = None
    ) -> dict[str, Any]:
        """Register a job on every pod; registering it again with the same settings changes nothing.

        :param incarnation: the one that the client has of the job already: this pod was restarted, and restores the
            job unless another pod contradicts (:mod:`refill_service.membership.who_holds`).
        :param num_pods: the number of pods on which that one ran, as far as the client knows.
        """
        known = self._table.jobs.get(spec.name)
        brought = incarnation or ""
        if known is not None and known.job.life.is_but_a_name_beside(brought):
            known = None
        if known is not None and not is_later(brought, known.job.incarnation):
            brought, journal = known.job.incarnation, None  # as it is here
        else:
            self._table.check_taking_jobs()
            self._table.opening.begin(spec.dataset)
            journal = journal_found(self._table.journal.find(spec.name)) if brought else None
        life = None if known is None else known.job.life
        order = how_to_register(life, journal, self._settings.num_pods, incarnation, num_pods)
        if order is Register.EVERYWHERE:
            return await (self._register(spec) if known is not None else self._register_new(spec))
        if order is Register.MOVE:
            return await self._moving.move(spec, brought)
        if order is Register.HERE_AFTER_ASKING:
            await self._who_holds.check_brought(spec, brought)
        return await self._here.register(spec, brought, "", begun=True) | {"pods": list(self._settings.pod_urls)}

    async def _register_new(self, spec: JobSpec) -> dict[str, Any]:
        announcing = asyncio.create_task(self._announce(spec))
        try:
            return await self._register(spec)
        finally:
            await announcing

    async def _announce(self, spec: JobSpec) -> None:
        """Let the other pods open the dataset already. Errors are left to the registration that follows."""
        with contextlib.suppress(RefillError):
            body = {"dataset": spec.dataset}
            path = f"/peer/v1/jobs/{spec.name}/opening"
            await self._peers.call_all(self._settings.other_pods, "POST", path, body)

    async def _register(self, spec: JobSpec) -> dict[str, Any]:
        ordinal, path = self._settings.ordinal, f"/peer/v1/jobs/{spec.name}"
        leader: dict[str, Any] = {"incarnation": "", "fingerprint": "", "begun": False, "created": False}
        if ordinal != LEADER:
            leader = await self._peers.call(LEADER, "PUT", path, {"spec": spec.to_dict()})
        created = leader["created"]
        try:
            info = await self._here.register(spec, leader["incarnation"], leader["fingerprint"], begun=leader["begun"])
            created = created or info.pop("created")
            body = {
                "spec": spec.to_dict(),
                "incarnation": info["incarnation"],
                "fingerprint": info["fingerprint"],
                "begun": leader["begun"] or info["begun"],
            }
            others = [pod for pod in self._settings.other_pods if pod != LEADER]
            await self._peers.call_all(others, "PUT", path, body)
        except RefillError as error:
            # One pod refuses it for good: the others must not keep it, or its name and memory would be taken.
            if created and error.status != 503 and not isinstance(error, JobError):
                with contextlib.suppress(RefillError):
                    await self.end_everywhere(spec.name, spec.holder)
            raise
        return info | {"pods": list(self._settings.pod_urls)}

    async def end_everywhere(self, name: str, holder: str) -> bool:
        """End a job on all pods; False when none has it. Errors as :meth:`JobTable.remove`."""
        path = f"/peer/v1/jobs/{name}?holder={quote(holder, safe='')}"
        removed = await self._peers.call_all(self._settings.other_pods, "DELETE", path, None)
        return await self._table.remove(name, holder) or any(answer["removed"] for answer in removed)

    async def idle_everywhere(self, name: str) -> bool:
        """Whether a job that is idle here is idle at all pods: a pod that owns little of the dataset, or sends far
        ahead, gets few requests. The job may be in use at a pod that does not answer."""
        path = f"/peer/v1/jobs/{name}"
        asked = (self._peers.call(pod, "GET", path) for pod in self._settings.other_pods)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        at_pod = self._table.jobs.get(name)
        if at_pod is None or not self._here.is_idle(at_pod):
            return False
        return all(
            isinstance(answer, UnknownJob) or (isinstance(answer, dict) and answer["idle"]) for answer in answers
        )
