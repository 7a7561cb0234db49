"""What is a job at one pod? The pod as its owner, the pod as the home of ranks; the records and receipts of both."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from refill.errors import EpochNotReady, InvalidInput
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import BatchRequest
from refill_service.cache_core.epoch_order import IdArray
from refill_service.cache_core.kept_runs import RunPart
from refill_service.cache_core.memory_shares import Claim
from refill_service.cache_core.receipt import EpochReceipt, has_begun, positions_of, sum_of_parts, without_damaged
from refill_service.jobs.home import Home
from refill_service.jobs.job import AskedPositions, Job
from refill_service.jobs.job_figures import RECEIPT_OUTCOMES, Clients, JobFigures, counts_of, sum_of_counts
from refill_service.jobs.job_use import JobUse
from refill_service.jobs.owner import Owner
from refill_service.jobs.running_epoch import RunningEpoch
from refill_service.memory.pinned_tier import PinnedShare
from refill_service.peers.job_peers import JobPeers
from refill_service.peers.peers import BodyPieces

log = logging.getLogger(__name__)

_KEPT_RECEIPTS = 300


@dataclass
class JobAtPod:
    """A live job at this pod: its settings, the pod as an owner, the pod as the home of ranks."""

    job: Job
    owner: Owner
    home: Home
    peers: JobPeers
    pinned: PinnedShare
    claim: Claim | None = None
    """None: its memory stays as it is while it runs."""
    processes: dict[int, str] = field(default_factory=dict)
    """At pod 0: by which process each other pod takes part."""
    ended: dict[int, dict[str, Any]] = field(default_factory=dict)
    """This pod's part of the receipts of epochs that will not be asked for again."""
    receipts: Counter[str] = field(default_factory=Counter)
    """Sums of this pod's parts of them, by ``RECEIPT_OUTCOMES``, since it was started."""
    clients: Clients = field(default_factory=Clients)
    gave_all: bool = False
    """Others have its memory, which may not change, until somebody asks for it again."""

    def __post_init__(self) -> None:
        self.use = JobUse(self.home.leases)

    @property
    def spec(self) -> JobSpec:
        return self.job.spec

    @property
    def memory_bytes(self) -> int:
        """What the job may use here."""
        return self.job.memory_bytes

    @property
    def num_counts(self) -> int:
        """How much :meth:`figures` has of epochs and ranks, about."""
        return len(self.owner.history) + len(self.home.machine.history) + len(self.clients.of_rank)

    def figures(self) -> JobFigures:
        machine, owners = self.home.machine, self.owner.history
        return JobFigures(
            self.job.policy,
            self.owner.epoch if owners else None,
            owners,
            machine.history.values(),
            self.clients,
            self.job.share_bytes,
            self.memory_bytes,
            self.owner.resident_bytes,
            machine.remote_memory.used,
            self.owner.recent_bytes,
            self.peers.sent_bytes,
            len(self.home.leases.alive()),
            self.owner.progress(),
            self.receipts,
            self.home.damaged.total,
            self.peers.waiting,
        )

    def users(self) -> dict[str, Any]:
        """Who uses the job, as far as this pod sees: the newest epoch that a rank has entered (None: none has), how
        many and which of the ranks whose home is here are alive, and how long nobody has asked for anything."""
        newest = self.job.ranks.newest
        return {"epoch": newest if newest >= 0 else None, **self.use.to_dict()}

    @property
    def is_finished(self) -> bool:
        """Whether all ranks are in the newest epoch, and have had all that this pod has of it and was sent for it."""
        never_came = any(self.home.machine.unused_ahead(self.owner.epoch).values())
        return self.owner.has_given_all and not never_came

    @property
    def taken_bytes(self) -> int:
        """What others can't have."""
        return 0 if self.gave_all else self.job.memory_bytes

    def memory_is(self, memory_bytes: int) -> None:
        """It stays as it is."""

    def let_go(self) -> None:
        """Forget the bytes of what nobody has asked for: should somebody do so all the same, it is read again."""
        log.info("job %s sleeps, and lets go of its memory", self.job.spec.name)
        self.home.machine.remote_memory.let_go()
        self.gave_all = True
        self.owner.let_go()

    def rank_opens(self, epoch: int, rank: int) -> None:
        """Fact: a rank asks for this epoch by way of another pod."""
        self.owner.rank_opens(epoch, rank)
        self.home.machine.left(epoch, rank)

    async def post_trace(self, epoch: int, rank: int, sample_ids: IdArray) -> None:
        """A rank of this home posts a trace: every owner keeps it. Errors as :meth:`Job.post_trace` and
        :meth:`RankEntry.check_comes_next`."""
        self.home.entry.check_comes_next(epoch, rank)
        await self.keep_trace(epoch, rank, sample_ids)
        await self.peers.call_all("PUT", f"epochs/{epoch}/ranks/{rank}/trace", BodyPieces(sample_ids))

    async def keep_trace(self, epoch: int, rank: int, sample_ids: IdArray) -> None:
        """At this pod. Errors as :meth:`Job.post_trace`."""
        await self.job.post_trace(epoch, rank, sample_ids)
        self.owner.trace_posted()

    async def asked_of_this_pod(self, request: BatchRequest) -> tuple[AskedPositions, RunningEpoch]:
        """What a home pod asks of this pod's share, and its epoch, as soon as that is open."""
        asked = await self.job.asked(request, self.owner.waits)
        if asked.repeats.any() or not self.job.share.holds(asked.samples).all():
            raise InvalidInput(
                f"pod {self.job.ordinal} was asked for positions that it does not answer: other job settings?"
            )
        return asked, await self.owner.open(asked.epoch, asked.rank)

    async def receipt(self, epoch: int) -> dict[str, Any]:
        """What an epoch delivered, over all pods: ``EpochReceipt`` as JSON, with what it is the receipt of.

        Samples that were sent ahead and never asked for were not delivered.
        """
        _, answers = await self._sum_of_pods(epoch)
        return receipt_of_parts(about_job(self.job) | {"epochs": [self.owner.epoch]}, answers, epoch)

    async def _sum_of_pods(self, epoch: int) -> tuple[EpochReceipt, list[dict[str, Any]]]:
        """The receipt before damage is told from delivery, and the pods' parts of it."""
        here = await self.receipt_here(epoch)
        answers = [here, *await self.peers.call_all("GET", f"epochs/{epoch}/receipt")]
        if not any(has_begun(part) for part in answers):
            raise self._has_not_begun(epoch)
        return sum_of_parts(answers), answers

    def _has_not_begun(self, epoch: int) -> InvalidInput:
        return InvalidInput(f"epoch {epoch} of job {self.job.spec.name} has not begun, or is long over")

    async def skipped(self, epoch: int, rank: int, start: int, end: int) -> tuple[int, int] | None:
        """The first part of the positions ``[start, end)`` that a rank has not asked for, be it that they are still to
        come. None: it has asked for all, or this pod can't say."""
        asked = self.home.machine.asked_of(epoch, rank)
        found = None if asked is None else asked.first_missing(start, end)
        first = 0 if asked is None else next(iter(asked), (0, 0))[0]
        if asked is None or found is None or found[0] >= first:
            return found
        receipt, answers = await self._sum_of_pods(epoch)
        had = receipt.ranks.get(rank, 0) + sum(answer["repeats"] for answer in answers)
        had += self.home.machine.positions_under_way(epoch, rank)
        # Else it was served by another home; owners know how much.
        return None if had >= first + asked.count else found

    async def receipt_here(self, epoch: int) -> dict[str, Any]:
        """This pod's part of it: of its share, and of what it was sent ahead. Raises as ``EpochBooks.receipt``."""
        if epoch in self.ended:
            return self.ended[epoch]
        if len(self.ended) >= _KEPT_RECEIPTS and epoch < min(self.ended):
            raise self._has_not_begun(epoch)
        home = self.home.machine
        receipt = (await self.owner.books.receipt(epoch)).to_dict()
        draws = await self.owner.books.draws(epoch)
        drawn = {} if draws is None else {"draws": draws}
        return drawn | {
            "epoch": epoch,
            "begun": self.owner.books.has_opened(epoch),
            "receipt": receipt,
            "unused_ahead": {str(rank): count for rank, count in home.unused_ahead(epoch).items()},
            "repeats": home.history[epoch].repeats if epoch in home.history else 0,
            "damaged": {str(rank): count for rank, count in self.home.damaged.by_rank(epoch).items()},
            "damaged_samples": self.home.damaged.named(epoch),
            "counts": self.counts_here(epoch),
        }

    def counts_here(self, epoch: int) -> dict[str, Any]:
        """What happened in an epoch at this pod; zeros when nothing did."""
        owner, home = self.owner.history.get(epoch), self.home.machine.history.get(epoch)
        return counts_of(self.job.ordinal, epoch, owner, home)

    async def counts_of_all_pods(self, epoch: int) -> dict[str, Any]:
        """``{"pods": [counts of each pod], "total": their sum}``, and of what."""
        counts = [self.counts_here(epoch), *await self.peers.call_all("GET", f"epochs/{epoch}")]
        return _of_counts(about_job(self.job), counts, epoch)

    async def kept_part(self, ended_at: float) -> RunPart | None:
        """What is kept of it when it has been closed. None: nobody had asked for anything."""
        epochs = dict(self.ended)
        for epoch in self.owner.books.epochs_begun:
            with contextlib.suppress(InvalidInput, EpochNotReady):  # nobody can have been served in it
                epochs[epoch] = await self.receipt_here(epoch)
        return RunPart.of(about_job(self.job, ended_at), epochs.values()) if epochs else None

    async def epoch_ended(self, epoch: int) -> None:
        """Its part of the receipt is final."""
        part = await self.receipt_here(epoch)
        self.home.machine.books_closed(epoch)
        self.home.damaged.forget(epoch)
        if epoch in self.ended:
            return
        self.ended[epoch] = part
        for outcome in RECEIPT_OUTCOMES:
            self.receipts[outcome] += part["receipt"][outcome]
        # Sent ahead in vain: its owner, another pod, has counted it as delivered, and does not know better.
        self.receipts["missing"] += sum(part["unused_ahead"].values())
        while len(self.ended) > _KEPT_RECEIPTS:
            self.ended.pop(next(iter(self.ended)))


def about_job(job: Job, ended_at: float = 0.0) -> dict[str, Any]:
    """What it is, beside what it delivered.

    :param ended_at: seconds since 1970; 0: it has not ended.
    """
    spec = job.spec
    return {
        "job": spec.name,
        "run": job.incarnation,
        "team": spec.holder,
        "pod": job.ordinal,
        "num_pods": job.num_pods,
        "dataset": spec.dataset,
        "policy": job.policy,
        "seed": spec.seed,
        "world_size": spec.world_size,
        "ended_at": ended_at,
        "owns_nothing": np.flatnonzero(np.diff(job.owner_bounds) == 0).tolist(),  # these pods have no part in any epoch
    }


def receipt_of_parts(about: dict[str, Any], parts: list[dict[str, Any]], epoch: int) -> dict[str, Any]:
    """As :meth:`JobAtPod.receipt`.

    :param about: of any of the parts.
    :param parts: each pod's of this epoch.
    """
    total = without_damaged(sum_of_parts(parts), parts)
    of_what = {name: about[name] for name in ("job", "run", "seed", "policy")}
    ended = about["ended_at"] > 0
    found = {"repeats": sum(part["repeats"] for part in parts)} | total.to_dict()
    found |= positions_of(parts, total)
    running = not ended and not found["exact"] and epoch >= max(about.get("epochs", [epoch]))
    state = {"epoch": epoch, "ended": ended, "running": running}
    return of_what | state | found


def counts_of_parts(about: dict[str, Any], parts: dict[int, dict[str, Any]], epoch: int) -> dict[str, Any]:
    """As :meth:`JobAtPod.counts_of_all_pods`.

    :param parts: by pod.
    """
    return _of_counts(about, [part["counts"] for part in parts.values()], epoch)


def _of_counts(about: dict[str, Any], counts: list[dict[str, Any]], epoch: int) -> dict[str, Any]:
    of_what = {"job": about["job"], "run": about["run"], "epoch": epoch, "ended": about["ended_at"] > 0}
    return of_what | sum_of_counts(counts)
