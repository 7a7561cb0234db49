"""Which runs does a live job's name stand for, and what did each deliver, after it has ended, too?

Each pod has its own part of a run: in the job itself while that runs, kept when it has ended. The pod after it keeps a
copy of what has ended. A receipt is the sum of the parts of all pods.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from refill.errors import InvalidInput, RefillError, UnknownJob
from refill_service.cache_core.admission import check_holder
from refill_service.cache_core.receipt import has_begun
from refill_service.jobs.job_at_pod import JobAtPod, about_job, counts_of_parts, receipt_of_parts
from refill_service.jobs.job_table import JobTable
from refill_service.peers.peers import Peers

_LEAST_PREFIX = 4


@dataclass(frozen=True)
class _Found:
    """A run, with each pod's part of one epoch."""

    about: dict[str, Any]
    parts: dict[int, dict[str, Any]]


class Runs:
    """Answers clients that ask for receipts and runs of jobs, by asking all pods."""

    def __init__(self, table: JobTable, peers: Peers) -> None:
        self._table = table
        self._peers = peers

    async def receipt(self, job: str, epoch: int, run: str, team: str) -> dict[str, Any]:
        """Of the team's run that runs, or ended last; or of the one that ``run`` begins the name of. Raises
        :class:`UnknownJob` for an epoch that has not begun, as for planned jobs."""
        if (at_pod := self._running(job, run, team)) is not None:
            try:
                return await at_pod.receipt(epoch)
            except InvalidInput as error:  # between pods UnknownJob says that one was restarted
                raise UnknownJob(error.message, job=job) from error
        found = await self._find(job, epoch, run, team)
        return receipt_of_parts(found.about, list(found.parts.values()), epoch)

    async def counts(self, job: str, epoch: int, run: str, team: str) -> dict[str, Any]:
        """Of an epoch; parameters as of :meth:`receipt`."""
        if (at_pod := self._running(job, run, team)) is not None:
            return await at_pod.counts_of_all_pods(epoch)
        found = await self._find(job, epoch, run, team)
        return counts_of_parts(found.about, found.parts, epoch)

    def _running(self, job: str, run: str, team: str) -> JobAtPod | None:
        """The run that runs here, if it is meant, and is the team's."""
        at_pod = self._table.of_team(team).get(job)
        return at_pod if at_pod is not None and _is_meant(at_pod.job.incarnation, run) else None

    def ended(self, team: str) -> list[dict[str, Any]]:
        """Runs that have ended, of which this pod keeps something; the newest first."""
        runs: dict[tuple[str, str], dict[str, Any]] = {}
        for part in self._table.kept_runs.of(team):
            about = part.about
            run = runs.setdefault(
                (about["job"], about["run"]),
                {name: about[name] for name in ("job", "run", "dataset", "policy", "world_size", "ended_at")}
                | {"first_epoch": about["epochs"][0], "last_epoch": about["epochs"][-1]},
            )
            run["first_epoch"] = min(run["first_epoch"], about["epochs"][0])
            run["last_epoch"] = max(run["last_epoch"], about["epochs"][-1])
        return list(runs.values())

    async def parts_here(self, job: str, epoch: int, run: str, team: str) -> list[dict[str, Any]]:
        """All that this pod has of runs of this name: ``{"about", "part"}`` of each, whose part is None where it has
        none of the epoch."""
        parts = []
        for part in self._table.kept_runs.of(team, job):
            if _is_meant(part.about["run"], run):
                parts.append({"about": part.about, "part": part.epoch(epoch)})
        at_pod = self._table.jobs.get(job)
        if at_pod is not None and at_pod.spec.holder in ("", team) and _is_meant(at_pod.job.incarnation, run):
            parts.append({"about": about_job(at_pod.job), "part": await _part_of(at_pod, epoch)})
        return parts

    async def _find(self, job: str, epoch: int, run: str, team: str) -> _Found:
        """Raises :class:`NotAllowed` where another team has the name and this one had no run of it,
        :class:`UnknownJob` for a run that no pod knows, or of which a pod's part is lost, or an epoch that it has not,
        and :class:`InvalidInput` for a name that fits several."""
        known, silent = await self._ask_all(job, epoch, run, team)
        runs: dict[str, list[dict[str, Any]]] = {}
        for each in known:
            runs.setdefault(each["about"]["run"], []).append(each)
        if not runs:
            if silent:
                raise silent[0]  # that pod may know it
            check_holder(job, self._table.holder(job) or "", team)
            which = f"run {run} of job {job}" if run else f"job {job}"
            raise UnknownJob(f"no pod knows {which}, nor receipts of it: refill jobs lists what there is", job=job)
        if run and len(runs) > 1:
            raise InvalidInput(f"run {run} of job {job} may be {' or '.join(sorted(runs))}: give more of its id")
        # One that has not ended is the newest.
        newest = max(runs, key=lambda each: max(found["about"]["ended_at"] or time.time() for found in runs[each]))
        about = max((found["about"] for found in runs[newest]), key=lambda about: about["ended_at"])
        parts = {found["about"]["pod"]: found["part"] for found in runs[newest] if found["part"] is not None}
        why = f"epoch {epoch} of job {job} has not begun, or is long over (run {about['run']})"
        not_begun = UnknownJob(why, job=job)
        if not parts:
            raise not_begun
        owns_nothing = {pod for found in runs[newest] for pod in found["about"].get("owns_nothing", ())}
        if lacks := [pod for pod in range(about["num_pods"]) if pod not in parts and pod not in owns_nothing]:
            if silent:
                raise silent[0]
            raise UnknownJob(
                f"what pod {lacks[0]} delivered in epoch {epoch} of job {job} is no longer known: it was restarted "
                "since, and receipts are only in pods' memory",
                job=job,
            )
        if not any(map(has_begun, parts.values())):
            raise not_begun
        return _Found(about, parts)

    async def _ask_all(
        self, job: str, epoch: int, run: str, team: str
    ) -> tuple[list[dict[str, Any]], list[BaseException]]:
        """What this pod and the others have, and the errors of those that did not answer."""
        path = (
            f"/peer/v1/jobs/{quote(job, safe='')}/runs/{epoch}?run={quote(run, safe='')}&holder={quote(team, safe='')}"
        )
        asked = (self._peers.call(pod, "GET", path) for pod in self._table.settings.other_pods)
        answers = await asyncio.gather(self.parts_here(job, epoch, run, team), *asked, return_exceptions=True)
        silent: list[BaseException] = [each for each in answers if isinstance(each, RefillError)]
        for each in answers:
            if isinstance(each, BaseException) and not isinstance(each, RefillError):
                raise each
        return [found for each in answers if isinstance(each, list) for found in each], silent


async def _part_of(at_pod: JobAtPod, epoch: int) -> dict[str, Any] | None:
    try:
        return await at_pod.receipt_here(epoch)
    except InvalidInput:
        return None


def _is_meant(run: str, asked: str) -> bool:
    return not asked or run == asked or (len(asked) >= _LEAST_PREFIX and run.startswith(asked))
