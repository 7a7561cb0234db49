"""What have ranks asked for and had of planned jobs, those that run and those that were ended?

Each pod knows its part: positions that ranks have asked it for, and what they have said that their loops had. A receipt
is made of all parts that can be had.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from refill.errors import UnknownJob
from refill.protocol.job_spec import JobSpec
from refill.protocol.position_set import PositionSet
from refill.protocol.receipt_digest import DigestPart, shown_digest
from refill_service.cache_core.planned.epoch_digest import MOST_DIGESTED, epoch_digest, planned_digest
from refill_service.cache_core.planned.received import ReceivedEpochs, packed_spans, receipt_of, spans_in
from refill_service.cache_core.skipped_positions import samples_skipped, skipped_for_good
from refill_service.jobs.job_figures import JobCounts, counts_of, sum_of_counts
from refill_service.jobs.job_table import JobTable
from refill_service.planned.planned_job import PlannedJob
from refill_service.planned.pods_away import PodsAway, planned_path

_KEPT_DIGESTS = 64
_KEPT_ENDED = 100
"""Of a team."""
_LEAST_ENDED_BYTES, _PART_ENDED, _BYTES_OF_COUNTS = 16 << 20, 200, 1000
"""Of all teams, that or such a part of the pod's memory; and what counts of an epoch take."""
_AT_ONCE_BYTES, _AT_ONCE_LETTERS, _AT_ONCE_RANKS = 100_000, 20_000, 200
"""Of what ranks have said of an epoch. More is merged by a thread."""

Result = TypeVar("Result")


class _Ended(NamedTuple):
    """Keeps what receipts need of a job that was ended here."""

    at: float
    """By the clock."""
    spec: JobSpec
    received: ReceivedEpochs
    counts: JobCounts
    digests: dict[int, int]
    """The plan's own, of its last epochs."""

    @property
    def kept_bytes(self) -> int:
        """What it takes, about."""
        return self.received.kept_bytes + _BYTES_OF_COUNTS * (len(self.counts.owners) + len(self.counts.homes))


class PlannedReceipts:
    """Knows what ranks have had of the planned jobs of one pod, and asks other pods for their parts.

    :param jobs: by name, those that run.
    """

    def __init__(self, jobs: Mapping[str, PlannedJob], table: JobTable, away: PodsAway) -> None:
        self._jobs, self._away = jobs, away
        self._table, self._settings = table, table.settings
        self._merging = asyncio.Lock()
        self._ended: OrderedDict[tuple[str, str, str], _Ended] = OrderedDict()
        """By team, name and plan; the newest last."""
        self._digests: OrderedDict[tuple[str, int, bytes], dict[str, Any]] = OrderedDict()
        """By plan, epoch and parts, what receipts say of them."""

    # Of jobs that were ended.

    def keep(self, job: PlannedJob) -> dict[int, int]:
        """Fact: a job ends here. Returns where the plan's own digests of its last epochs belong, once they are made."""
        key = job.spec.holder, job.spec.name, job.plan_id
        self._ended.pop(key, None)
        digests: dict[int, int] = {}
        job.received.are_over()
        self._ended[key] = _Ended(time.time(), job.spec, job.received, job.counts, digests)
        of_team = [each for each in self._ended if each[0] == job.spec.holder]
        for oldest in of_team[:-_KEPT_ENDED]:
            del self._ended[oldest]
        self._forget_some()
        return digests

    def ended_at(self, spec: JobSpec, plan_id: str) -> float | None:
        """When a job was ended here that had this plan; None: it was not, as far as is known."""
        ended = self._ended.get((spec.holder, spec.name, plan_id))
        return None if ended is None else ended.at

    def goes_on(self, spec: JobSpec, plan_id: str) -> None:
        """Fact: it runs here again."""
        self._ended.pop((spec.holder, spec.name, plan_id), None)

    def _forget_some(self) -> None:
        """Of jobs that have ended so much is kept, of all teams: the team that has most gives way. That a job has ended
        is still known then."""
        of_teams: Counter[str] = Counter()
        for (team, *_), ended in self._ended.items():
            of_teams[team] += ended.kept_bytes
        most_bytes = max(_LEAST_ENDED_BYTES, self._settings.memory_bytes // _PART_ENDED)
        while of_teams.total() > most_bytes:
            (largest, _), *_ = of_teams.most_common(1)
            key = next(key for key, ended in self._ended.items() if key[0] == largest and ended.kept_bytes)
            ended = self._ended[key]
            of_teams[largest] -= ended.kept_bytes
            if ended.received.epochs:
                ended.received.forget_oldest()
            if not ended.received.epochs:
                ended = self._ended[key] = ended._replace(counts=JobCounts())
            of_teams[largest] += ended.kept_bytes

    def ended(self, team: str) -> list[dict[str, Any]]:
        """Runs that were ended here and of which this pod has a receipt, as :meth:`Runs.ended` lists them."""
        return [
            {
                "job": name,
                "run": plan_id,
                "dataset": found.spec.dataset,
                "policy": found.spec.policy,
                "world_size": found.spec.world_size,
                "ended_at": found.at,
                "first_epoch": found.received.epochs[0],
                "last_epoch": found.received.epochs[-1],
            }
            for (_, name, plan_id), found in reversed(self._ended.items())
            if _is_of(team, found.spec) and found.received.epochs
        ]

    async def about_here(self, name: str, epoch: int, run: str, team: str, *, packed: bool) -> dict[str, Any]:
        """What this pod knows of a team's job that runs, else of the one that was ended here last, and of an epoch of
        it. Raises :class:`UnknownJob`.

        :param run: the beginning of its plan_id.
        :param packed: as of :meth:`EpochReceived.to_dict`.
        """
        of_name: list[tuple[str, PlannedJob | _Ended]] = []
        if (job := self._jobs.get(name)) is not None:
            of_name.append((job.plan_id, job))
        of_name += [(plan_id, found) for (_, ended, plan_id), found in reversed(self._ended.items()) if ended == name]
        meant = [(plan_id, found) for plan_id, found in of_name if plan_id.startswith(run) and _is_of(team, found.spec)]
        if not meant:
            raise self._unknown(name)
        plan_id, known = meant[0]
        received, counts = known.received.of(epoch), known.counts
        said = None
        if received is not None:
            is_large = received.used_bytes > _AT_ONCE_BYTES
            told = partial((received.copy() if is_large else received).to_dict, packed=packed)
            said = await self._by_thread(told) if is_large else told()
        return {
            "spec": known.spec.to_dict(),
            "plan_id": plan_id,
            "ended": known is not job,
            "newest": known.received.newest,
            "received": said,
            "digest": shown_digest(known.digests[epoch])
            if isinstance(known, _Ended) and epoch in known.digests
            else None,
            "counts": counts_of(self._settings.ordinal, epoch, counts.owners.get(epoch), counts.homes.get(epoch)),
        }

    async def _about(self, name: str, epoch: int, team: str, run: str) -> list[dict[str, Any]]:
        """Of all pods that can be asked; of the team's job that runs, else of the one that was ended. Empty: no pod
        knows a planned job of this name that is the team's."""
        if name in self._table.of_team(team) and not run:
            return []
        query = f"run={quote(run, safe='')}&holder={quote(team, safe='')}&packed=true"
        found = await self._away.answers_of(
            self._settings.other_pods, "GET", f"{planned_path(name)}/epochs/{epoch}?{query}"
        )
        with contextlib.suppress(UnknownJob):
            found.insert(0, await self.about_here(name, epoch, run, team, packed=True))
        there: list[dict[str, Any]] = [each for each in found if each is not None]
        first = min(there, key=lambda each: bool(each["ended"]), default=None)
        if first is None:
            return []
        of_run = ("plan_id", "ended")
        return [first, *(each for each in there if each is not first and all(each[n] == first[n] for n in of_run))]

    async def receipt(self, name: str, epoch: int, team: str, run: str) -> dict[str, Any] | None:
        """None: no pod knows a planned job of this name that is the team's. Raises :class:`UnknownJob` when none has
        heard of that epoch.

        :param run: the beginning of its plan_id; empty: of the run that there is, else of the one that ended last.
        """
        about = await self._about(name, epoch, team, run)
        if not about:
            return None
        parts = [each["received"] for each in about if each["received"] is not None]
        if not parts:
            raise UnknownJob(f"epoch {epoch} of job {name} has not begun, or is long over", job=name)
        found = await self._by_thread(partial(receipt_of, parts)) if _are_large(parts) else receipt_of(parts)
        spec, plan_id, ended = about[0]["spec"], about[0]["plan_id"], bool(about[0]["ended"])
        of_what = {"job": name, "run": plan_id, "plan_id": plan_id, "seed": spec.get("seed", 0), "policy": "planned"}
        is_newest = epoch >= max(int(each["newest"]) for each in about)
        running = not ended and is_newest and not found["exact"]
        given_up = sum(int(each["counts"]["given_up_bytes"]) for each in about)
        if spec.get("read_seed") is not None:
            of_what["read_seed"] = spec["read_seed"]
        of_what |= {"epoch": epoch, "ended": ended, "running": running, "given_up_bytes": given_up}
        return of_what | found | await self._digest(name, epoch, about, parts)

    async def _by_thread(self, work: Callable[[], Result]) -> Result:
        """However many ask for receipts, they take one of the threads that orders are planned in."""
        async with self._merging:
            return await asyncio.to_thread(work)

    async def _digest(
        self, name: str, epoch: int, about: list[dict[str, Any]], received: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """What loops have had, as far as pods were told."""
        told = partial(_digest_parts, received)
        parts = await self._by_thread(told) if _are_large(received) else told()
        plan_id, num_positions = about[0]["plan_id"], int(received[0]["dealing"][0])
        if num_positions > MOST_DIGESTED or about[0]["spec"].get("order") == "explicit":
            return {}
        job = self._jobs.get(name)
        if job is not None and job.plan_id == plan_id:
            return await self._digest_of(job, epoch, parts)
        whole = next((int(each["digest"], 16) for each in about if each.get("digest") is not None), None)
        return await self._by_thread(partial(epoch_digest, parts, num_positions, plan_id, epoch, None, whole))

    async def _digest_of(self, job: PlannedJob, epoch: int, parts: list[DigestPart]) -> dict[str, Any]:
        """Of a job that runs here, with the plan's order beside it."""

        def found() -> dict[str, Any]:
            key = job.plan_id, epoch, _name_of(parts)
            if key not in self._digests:
                order = job.orders.whole(epoch) if parts else None
                self._digests[key] = epoch_digest(parts, job.layout.num_samples, job.plan_id, epoch, order)
                while len(self._digests) > _KEPT_DIGESTS:
                    self._digests.popitem(last=False)
            return self._digests[key]

        return await self._by_thread(found)

    async def counts(self, name: str, epoch: int, team: str, run: str) -> dict[str, Any] | None:
        """What an epoch cost, at each pod and in sum. None: no pod knows a planned job of this name."""
        about = await self._about(name, epoch, team, run)
        if not about:
            return None
        of_what = {"job": name, "run": about[0]["plan_id"], "epoch": epoch, "ended": about[0]["ended"]}
        return of_what | sum_of_counts(sorted((each["counts"] for each in about), key=lambda counts: counts["pod"]))

    async def check_left(self, name: str, epoch: int, rank: int) -> None:
        """Fact: a rank has left an epoch. Raises :class:`SamplesSkipped` when it has asked for positions of it far
        behind others that it never asked for."""
        if len(self._job(name).received.asked_of(epoch, rank)[0]) < 2:
            return  # no other pod need be asked
        asked, largest_batch = await self._asked(name, epoch, rank)
        gap = None if asked is None else skipped_for_good(asked, largest_batch)
        if gap is not None:
            raise samples_skipped(name, rank, epoch, *gap)

    async def left_out(self, name: str, epoch: int, rank: int, start: int, end: int) -> tuple[int, int] | None:
        """The first part of a rank's positions ``[start, end)`` that no pod was asked for. None: there is none, or it
        can't be said: a pod was restarted since, or does not answer."""
        asked, _ = await self._asked(name, epoch, rank)
        return None if asked is None else asked.first_missing(start, end)

    async def _asked(self, name: str, epoch: int, rank: int) -> tuple[PositionSet | None, int]:
        """Of all pods, and the most that were asked for at once; None: a pod was restarted since, does not answer, or
        had no room for all of it."""
        parts = [
            self.asked_here(name, epoch, rank, packed=True),
            *await self._of_others(name, f"{epoch}/ranks/{rank}?packed=true"),
        ]
        asked = PositionSet()
        for part in parts:
            if part is None or not part["whole"]:
                return None, 0
            asked.add_spans(spans_in(part["asked"]))
            await asyncio.sleep(0)
        return asked, max(int(part["largest_batch"]) for part in parts)

    def asked_here(self, name: str, epoch: int, rank: int, *, packed: bool) -> dict[str, Any]:
        """:param packed: as of :meth:`EpochReceived.to_dict`."""
        job = self._job(name)
        asked, largest_batch, is_all = job.received.asked_of(epoch, rank)
        return {
            "whole": is_all and not job.began_midway,
            "asked": packed_spans(asked) if packed else list(asked),
            "largest_batch": largest_batch,
        }

    async def _of_others(self, name: str, of_epoch: str) -> list[Any]:
        path = f"{planned_path(name)}/epochs/{of_epoch}"
        return await self._away.answers_of(self._settings.other_pods, "GET", path)

    def _job(self, name: str) -> PlannedJob:
        if (job := self._jobs.get(name)) is None:
            raise self._unknown(name)
        return job

    def _unknown(self, name: str) -> UnknownJob:
        return UnknownJob(f"pod {self._settings.ordinal} knows no job {name}", job=name)


async def last_digests(job: PlannedJob) -> dict[int, int]:
    """When a job has ended: the plan's own digests of its last epochs of which loops have said what they had."""
    epochs = [epoch for epoch in job.received.epochs if (at := job.received.of(epoch)) and at.digests]
    if job.lists is not None or job.layout.num_samples > MOST_DIGESTED:
        return {}

    def found() -> dict[int, int]:
        return {each: planned_digest(job.plan_id, each, job.orders.whole(each)) for each in epochs[-2:]}

    return await asyncio.to_thread(found)


def _are_large(received: list[dict[str, Any]]) -> bool:
    """Of an epoch, what pods have been told."""
    return any(
        sum(map(len, part["received"].values())) + sum(len(each[5]) for each in part.get("digests", ()))
        > _AT_ONCE_LETTERS
        or len(part["received"]) > _AT_ONCE_RANKS
        for part in received
    )


def _name_of(parts: list[DigestPart]) -> bytes:
    """The same of the same parts, in whatever order."""
    return hashlib.blake2b(repr(sorted(set(parts))).encode()).digest()


def _digest_parts(received: list[dict[str, Any]]) -> list[DigestPart]:
    return [DigestPart.from_list(said) for each in received for said in each.get("digests", [])]


def _is_of(team: str, spec: JobSpec) -> bool:
    """Whether a team may hear of it: its own, and what nobody registered with a token."""
    return spec.holder in ("", team)
