"""How does a job that runs move to more or to fewer pods, or back to pods that have all forgotten how it was dealt?

Pod 0 begins it, under the next name of its line, when all other pods answer. Then ranks report what they have received
(:mod:`refill_service.membership.recovery`). :func:`how_to_move` decides.
"""

from __future__ import annotations

import logging
from typing import Any

from refill.protocol.incarnation import is_later, same_line
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.job_holder import check_holder
from refill_service.cache_core.job_lifecycle import how_to_move, is_another
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.jobs.job_table import JobTable
from refill_service.membership.jobs_here import LEADER, JobsHere, journal_found
from refill_service.membership.who_holds import WhoHolds
from refill_service.peers.peers import Peers

__all__ = ["Moving"]

log = logging.getLogger(__name__)


class Moving:
    """Moves jobs: pod 0 itself, other pods by way of it."""

    def __init__(self, table: JobTable, peers: Peers, who_holds: WhoHolds, here: JobsHere) -> None:
        self._table = table
        self._peers = peers
        self._who_holds = who_holds
        self._here = here

    async def move(self, spec: JobSpec, incarnation: str) -> dict[str, Any]:
        """Go on with a job that runs, on the pods that there are now.

        :param incarnation: by which a client knows it.
        """
        table, name = self._table, spec.name
        pods = {"pods": list(table.settings.pod_urls)}
        if table.settings.ordinal != LEADER:
            body = {"spec": spec.to_dict(), "incarnation": incarnation}
            info = await self._peers.call(LEADER, "POST", f"/peer/v1/jobs/{name}/move", body)
            return await self._here.register(spec, info["incarnation"], info["fingerprint"], begun=True) | pods
        async with self._here.registering:
            known = table.jobs.get(name)
            if known is not None:
                check_holder(name, known.job.spec.holder, spec.holder)
            is_free = known is None or known.job.life.is_but_a_name_beside(incarnation)
            if known is None or is_free or is_later(incarnation, known.job.incarnation):
                known = await self._begin(spec, incarnation)
        if not same_line(known.job.incarnation, incarnation):
            raise is_another(name)
        return await self._here.register(spec, known.job.incarnation, "", begun=True) | pods

    async def _begin(self, spec: JobSpec, incarnation: str) -> JobAtPod:
        table, name = self._table, spec.name
        self._here.check_may_go_on(name, incarnation)
        kept = table.journal.find(name)
        elsewhere, silent = await self._who_holds.known_elsewhere(name, spec.holder)
        if silent:
            raise silent[0]
        if name in table.jobs:
            elsewhere.append(self._here.known(name))
        journal_is_enough = kept is not None and kept.whole and kept.header["num_pods"] == table.settings.num_pods
        order = how_to_move(name, journal_found(kept), incarnation, elsewhere, journal_is_enough)
        for known in elsewhere:
            if same_line(known.incarnation, incarnation):
                known.check_settings(spec)
        of_this = kept if order.from_journal else None
        if order.moving:
            self._here.check_was_the_same(spec, of_this)
        await table.forget(name)  # as it was, under an earlier name
        if not order.moving:
            return await self._here.begin(spec, order.incarnation, begun=True)
        at_pod = await self._here.make(spec, order, of_this)
        log.warning("job %s ran on another number of pods, and moves to %d", name, table.settings.num_pods)
        return at_pod
