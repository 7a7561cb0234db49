"""What do other pods learn before a home pod serves a rank, epoch after epoch? Who the rank is, and in which epoch."""

from __future__ import annotations

import logging

from refill.errors import InvalidInput, RankTaken, RefillError
from refill.protocol.rank_life import RankLife
from refill_service.cache_core.home_machine import Entry, HomeMachine
from refill_service.cache_core.rank_places import LONGEST_STEP
from refill_service.jobs.job import Job
from refill_service.jobs.leased_ranks import LeasedRanks
from refill_service.jobs.owner import Owner
from refill_service.memory.payload import Payload
from refill_service.peers.job_peers import JobPeers

__all__ = ["RankEntry"]

log = logging.getLogger(__name__)


class RankEntry:
    """Of one job at one home pod."""

    def __init__(
        self,
        machine: HomeMachine[Payload],
        job: Job,
        owner: Owner,
        leases: LeasedRanks,
        peers: JobPeers,
    ) -> None:
        self._machine = machine
        self._job = job
        self._owner = owner
        self._leases = leases
        self._peers = peers

    def check_comes_next(self, epoch: int, rank: int) -> None:
        """Raises :class:`InvalidInput` for an epoch in which the rank can't be yet."""
        ranks, name = self._job.ranks, self._job.spec.name
        if not ranks.may_ask(epoch):
            raise InvalidInput(
                f"rank {rank} asks for epoch {epoch} while job {name} is in epoch {ranks.newest}: at most "
                f"{LONGEST_STEP:,} may be left out. Was set_epoch given a number of steps? To go on there all the "
                f"same, end the job first (refill end {name}) or use another name",
                epoch=epoch,
                rank=rank,
                newest=ranks.newest,
            )

    async def enter(self, epoch: int, rank: int) -> None:
        """Every owner learns when a rank enters an epoch, so that none waits for it in an earlier one."""
        entry = self._machine.entry(epoch, rank)
        if entry is Entry.KNOWN:
            return
        if entry is Entry.COMES and self._leases.holder(rank) is not None and self._peers.others:
            # Before any pod learns of it: a process that one of them refuses must not move the rank on at the others.
            # Once it has entered here, another process can't have become the rank elsewhere: that makes it come anew.
            await self._post_to_others(rank, f"ranks/{rank}/asks")
        self._owner.rank_opens(epoch, rank)
        await self._post_to_others(rank, f"epochs/{epoch}/ranks/{rank}")
        self._machine.entered(epoch, rank)

    async def take_over(self, rank: int, ended: RankLife, by: RankLife) -> None:
        """Fact: a process that is a rank has ended, as the one that goes on in its place has seen."""
        self._leases.ended(rank, ended, by)
        try:
            await self._peers.call_all("POST", f"ranks/{rank}/ended", {"life": ended.encode(), "by": by.encode()})
        except RankTaken:
            raise
        except RefillError as error:
            log.info("rank %d goes on by way of pod %d, as not all pods know: %s", rank, self._job.ordinal, error)

    async def _post_to_others(self, rank: int, what: str) -> None:
        """Who the rank is. Raises :class:`RankTaken` when one of them is home to another process that is this rank."""
        life = self._leases.holder(rank)
        try:
            await self._peers.call_all("POST", what, None if life is None else {"life": life.encode()})
        except RankTaken:
            if life is not None:
                self._leases.returned(rank, life)
            raise
