"""How does a job go on from a checkpoint with other ranks, or on other pods, than it was saved with?

Pod 0 decides for all. Where nothing has changed there is nothing to do: the same requests get the same samples. Else it
asks every pod which samples were consumed when all ranks had come to the checkpoint's position, from their tables or
their journals, and registers the job anew with the rest of the epoch dealt to the ranks that there are now. The old
registration ends, so that whoever is left over from before is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from refill.errors import EpochEnded, InvalidInput, JobConflict, JobLost, PodBusy, UnknownJob
from refill.protocol.incarnation import line_of, moves_of, same_line
from refill.protocol.job_spec import JobSpec
from refill.protocol.records import Kind
from refill.protocol.wire_format import Int64Array
from refill_service.cache_core.epoch_order import ExplicitTraces, Traces
from refill_service.cache_core.job_holder import check_holder
from refill_service.cache_core.job_lifecycle import KnownJob
from refill_service.cache_core.rank_places import NOT_BEGUN
from refill_service.cache_core.resumed_epoch import (
    NOT_KNOWN_HERE,
    ResumedEpoch,
    consumed_at_pod,
    consumed_in_all,
    epoch_resumed,
    is_resumed,
    keyed_traces,
    resumed_incarnation,
)
from refill_service.jobs.job_table import JobTable
from refill_service.journal.journal import KeptJob
from refill_service.membership.jobs_here import LEADER, JobsHere
from refill_service.membership.registration import Registration
from refill_service.membership.who_holds import WhoHolds
from refill_service.peers.peers import Peers

__all__ = ["Checkpoint", "Resuming"]

log = logging.getLogger(__name__)

_IS_RESUMED = 2**31
"""In place of how often the job had moved: a pod that has the resumed job knows more than any that has the one before,
however often that one has moved."""


@dataclass(frozen=True)
class Checkpoint:
    """Where a training run was when it was saved: what the states of its ranks have in common."""

    incarnation: str
    """The job's incarnation then, or the line of it."""
    epoch: int
    position: int
    """The first position that a rank had not consumed; the same for all ranks."""


class Resuming:
    """Resumes jobs at this pod, or has pod 0 do so."""

    def __init__(
        self, table: JobTable, peers: Peers, who_holds: WhoHolds, here: JobsHere, registration: Registration
    ) -> None:
        self._table = table
        self._settings = table.settings
        self._peers = peers
        self._who_holds = who_holds
        self._here = here
        self._registration = registration
        self._one_at_a_time = asyncio.Lock()
        self._rest_of: tuple[str, ResumedEpoch] | None = None
        """The name of a job, and what is left of its epoch. Kept until the job is registered: pods first drop their
        records of the job as it was, and another attempt could not ask for them again."""

    async def resume(self, spec: JobSpec, checkpoint: Checkpoint) -> dict[str, Any]:
        """Register a job as it goes on from a checkpoint; again, by another rank, changes nothing.

        Raises :class:`JobConflict` when another rank has resumed it from another step, :class:`JobLost` when nobody
        knows any more what was delivered.
        """
        if self._settings.ordinal != LEADER:
            body = {"spec": spec.to_dict(), "checkpoint": vars(checkpoint)}
            path = f"/peer/v1/jobs/{spec.name}/resume"
            return dict(await self._peers.call(LEADER, "POST", path, body))
        async with self._one_at_a_time:
            # A state may be from before the job moved to other pods: its position means the same after it.
            line = line_of(checkpoint.incarnation)
            return await self._resume(spec, Checkpoint(line, checkpoint.epoch, checkpoint.position))

    async def _resume(self, spec: JobSpec, checkpoint: Checkpoint) -> dict[str, Any]:
        known = await self._known(spec)
        current = "" if known is None else line_of(known.incarnation)
        if (here := self._table.jobs.get(spec.name)) is not None and not here.job.life.traces_are_final:
            raise here.job.recovering()  # first it has to move, with the ranks that it has
        incarnation = resumed_incarnation(
            checkpoint.incarnation, checkpoint.epoch, checkpoint.position, spec.world_size, self._settings.num_pods
        )
        if current in (incarnation, checkpoint.incarnation) and (info := await self._unchanged(spec)) is not None:
            return info
        resumed = await self._resumed(spec.name, current)
        again = resumed is not None and Checkpoint(resumed.incarnation, resumed.epoch, resumed.position) == checkpoint
        same_ranks = known is not None and known.world_size == spec.world_size
        if again and same_ranks and (info := await self._unchanged(spec)) is not None:
            return info  # it has moved to other pods since
        of_this = resumed is not None and resumed.incarnation == checkpoint.incarnation
        is_running = resumed is not None and of_this and known is not None and known.running and current != incarnation
        if is_running and again:
            await self._until_nobody_is_alive(spec)  # it died before it saved another state
        elif is_running and resumed is not None:
            raise JobConflict(
                f"job {spec.name} was resumed from epoch {resumed.epoch}, position {resumed.position} by another rank, "
                f"and this rank's state says epoch {checkpoint.epoch}, position {checkpoint.position}, world_size "
                f"{spec.world_size}: with another number of ranks or pods, all must load states of the same step"
            )
        if spec.order != "keyed":
            raise InvalidInput(
                f"job {spec.name} has traces of its ranks' own: it can be resumed with the same ranks and pods only"
            )
        if not again:
            await self._check_was_reached(spec, checkpoint)
        rest = resumed if again and resumed is not None else await self._rest(spec, checkpoint, incarnation)
        self._rest_of = spec.name, rest
        info = await self._registration.register_resumed(spec, incarnation, rest)
        self._rest_of = None
        return info

    async def _until_nobody_is_alive(self, spec: JobSpec) -> None:
        """Raises :class:`PodBusy` while ranks are alive that resumed a job from the same state in another number."""
        known = await self._known_to_all(spec)
        if alive := sum(each.ranks_alive for each in known):
            raise PodBusy(
                f"job {spec.name} was resumed from this state with world_size {known[-1].world_size}, and {alive} of "
                f"those ranks are alive: when they have ended, it goes on with world_size {spec.world_size}"
            )

    async def _check_was_reached(self, spec: JobSpec, checkpoint: Checkpoint) -> None:
        """Raises :class:`InvalidInput` when ranks are alive in a job that has never been as far as the checkpoint: that
        is of another job, and must not take the place of this one."""
        known = await self._known_to_all(spec)
        newest = max((each.newest for each in known), default=NOT_BEGUN)
        # What is saved at the end of an epoch goes on at the start of the next.
        reached = (checkpoint.epoch, checkpoint.position) <= (newest + 1, 0)
        if newest > NOT_BEGUN and not reached and any(each.ranks_alive for each in known):
            raise InvalidInput(
                f"job {spec.name} runs, is in epoch {newest}, and has never been at epoch {checkpoint.epoch}, position "
                f"{checkpoint.position}: resume from a checkpoint of this job, or use another name, or end the job "
                f"first (DELETE /v1/jobs/{spec.name})"
            )

    async def _known_to_all(self, spec: JobSpec) -> list[KnownJob]:
        """What each pod knows of the job, this one too. Raises what kept a pod from answering."""
        known, silent = await self._who_holds.known_elsewhere(spec.name, spec.holder)
        if silent:
            raise silent[0]
        with contextlib.suppress(UnknownJob):
            known.append(self._here.known(spec.name))
        return known

    async def _rest(self, spec: JobSpec, checkpoint: Checkpoint, incarnation: str) -> ResumedEpoch:
        if self._rest_of is not None:
            name, rest = self._rest_of
            if name == spec.name and Checkpoint(rest.incarnation, rest.epoch, rest.position) == checkpoint:
                return rest
        done, unknown = await self._done(spec, checkpoint, incarnation)
        if unknown:
            log.warning("job %s is resumed, and of %d samples nobody knows who had them", spec.name, unknown)
        return ResumedEpoch(checkpoint.incarnation, checkpoint.epoch, checkpoint.position, done, unknown)

    async def _known(self, spec: JobSpec) -> KnownJob | None:
        """What pods know of the job; None when none does."""
        try:
            known = self._here.known(spec.name)
        except UnknownJob:
            return await self._who_holds.known_to_others(spec.name, spec.holder)
        check_holder(spec.name, known.holder, spec.holder)
        return known

    async def _resumed(self, name: str, line: str) -> ResumedEpoch | None:
        """How the job as it is now was resumed before. None: it was not, or no pod knows."""
        if not is_resumed(line):
            return None
        try:
            return self._here.resumed(name, line)
        except UnknownJob:
            try:
                return await self._here.resumed_at_others(name, line)
            except JobLost:
                return None

    async def _unchanged(self, spec: JobSpec) -> dict[str, Any] | None:
        """The job as the pods have it, if it can simply be registered again."""
        try:
            return await self._registration.register(spec)
        except (JobConflict, JobLost):
            return None

    async def _done(self, spec: JobSpec, checkpoint: Checkpoint, incarnation: str) -> tuple[Int64Array, int]:
        """The samples that were consumed, and how many more were that no pod knows."""
        if checkpoint.position == 0 and epoch_resumed(checkpoint.incarnation) != checkpoint.epoch:
            return np.empty(0, dtype=np.int64), 0  # else ranks had consumed some of it before it was resumed there
        what = f"/peer/v1/jobs/{spec.name}/consumed"
        query = f"?incarnation={checkpoint.incarnation}&epoch={checkpoint.epoch}&position={checkpoint.position}"
        others = self._settings.other_pods
        asked = (self._peers.get_bytes(pod, f"{what}{query}&resumed={incarnation}") for pod in others)
        here = await self.consumed(spec.name, checkpoint, incarnation)
        answers = [here, *(np.frombuffer(answer, dtype="<i8") for answer in await asyncio.gather(*asked))]
        if (found := consumed_in_all(answers)) is None:
            raise JobLost(
                f"job {spec.name} can't be resumed at epoch {checkpoint.epoch}, position {checkpoint.position}: no pod "
                "knows any more what was delivered before; start the epoch anew, under another job name",
                job=spec.name,
            )
        done, expected, requests = found
        if expected >= requests:
            raise InvalidInput(
                f"nothing is left of epoch {checkpoint.epoch} at position {checkpoint.position}: "
                f"resume at position 0 of epoch {checkpoint.epoch + 1}"
            )
        return done, max(0, expected - len(done))

    async def consumed(self, name: str, checkpoint: Checkpoint, resumed: str) -> Int64Array:
        """What this pod knows of the samples that were consumed, as of :func:`consumed_at_pod`."""
        at_pod = self._table.jobs.get(name)
        if at_pod is not None and same_line(at_pod.job.incarnation, resumed) and at_pod.job.resumed is not None:
            # An earlier attempt to resume has registered the job here already, with all of them.
            before = at_pod.job.resumed
            num_samples = at_pod.job.layout.num_samples
            return np.concatenate([[len(before.done) + before.unknown, num_samples, _IS_RESUMED], before.done])
        if at_pod is not None and same_line(at_pod.job.incarnation, checkpoint.incarnation):
            job = at_pod.job
            if job.life.recovering:
                raise at_pod.job.recovering()
            job.check_traces(checkpoint.epoch)
            traces = job.known_traces(checkpoint.epoch)
            answered = at_pod.owner.answered(checkpoint.epoch)
            if traces is None or answered is None:
                raise self._too_old(name, checkpoint)
            return consumed_at_pod(
                checkpoint.epoch,
                checkpoint.position,
                [answered],
                traces,
                job.spec.world_size,
                job.resumed,
                job.life.moves,
            )
        kept = self._table.journal.find(name)
        if kept is None or line_of(kept.header["incarnation"]) != checkpoint.incarnation:
            return NOT_KNOWN_HERE
        return self._consumed_of_journal(name, kept, checkpoint)

    def _consumed_of_journal(self, name: str, kept: KeptJob, checkpoint: Checkpoint) -> Int64Array:
        """As :meth:`consumed`, of a job that ran on another number of pods: only its journal is here."""
        spec = JobSpec.from_dict(kept.header["spec"])
        of_epoch = [record for record in kept.records if record.epoch == checkpoint.epoch]
        # A journal that is whole and ends before the epoch says that this pod was asked for nothing of it.
        ends_before = kept.whole and all(record.epoch < checkpoint.epoch for record in kept.records)
        if not of_epoch and not ends_before:
            raise self._too_old(name, checkpoint)
        num_samples = kept.header["num_samples"]
        dealt_anew = {each.rank: each.columns[0] for each in of_epoch if each.kind is Kind.TRACE}
        traces: Traces
        if len(dealt_anew) == spec.world_size:  # when the job moved
            traces = ExplicitTraces(num_samples, dealt_anew)
        else:
            traces = keyed_traces(spec, checkpoint.epoch, num_samples, kept.resumed)
        answered = [(each.columns[0], each.columns[1]) for each in of_epoch if each.kind is Kind.ANSWERED]
        moves = moves_of(kept.header["incarnation"])
        return consumed_at_pod(
            checkpoint.epoch, checkpoint.position, answered, traces, spec.world_size, kept.resumed, moves
        )

    def _too_old(self, name: str, checkpoint: Checkpoint) -> EpochEnded:
        return EpochEnded(
            f"job {name} can't be resumed at epoch {checkpoint.epoch}, position {checkpoint.position}: pods keep what "
            "they delivered in the running epoch and the one before; resume from a later checkpoint, or from the start "
            "of an epoch, under another job name"
        )
