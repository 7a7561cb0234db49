"""How does a job become known to all pods, and known again to one that was restarted?

A client registers a job at any pod. Pod 0 names its *incarnation*, so that ranks that come at the same time agree; the
others take it from there. A pod that was restarted takes a job up again when it is asked for it: from its journal, or
from what others know (:mod:`refill_service.membership.recovery`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from refill.errors import JobConflict, JobError, JobLost, JobMoved, PodUnreachable, RefillError, UnknownJob
from refill.protocol.incarnation import incarnation_of, line_of, moves_of
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.job_holder import check_holder
from refill_service.cache_core.resumed_epoch import ResumedEpoch, decode_resumed, is_resumed
from refill_service.jobs.job import Job
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.journal.journal import KeptJob
from refill_service.membership.recovery import Recovery
from refill_service.membership.who_holds import WhoHolds

if TYPE_CHECKING:
    from refill_service.pod.cache_node import CacheNode

__all__ = ["Registration"]

log = logging.getLogger(__name__)

_KEPT_FAILURES = 100
_LEADER = 0
"""The pod that names the incarnation of a job."""


class Registration:
    """Registers jobs at this pod, and at the others by way of it."""

    def __init__(self, node: CacheNode) -> None:
        self._node = node
        self.who_holds = WhoHolds(node)
        self._registering = asyncio.Lock()
        self._failed_moves: dict[str, str] = {}
        """By incarnation, why a job could not move."""

    async def register(
        self, spec: JobSpec, incarnation: str | None = None, num_pods: int | None = None
    ) -> dict[str, Any]:
        """Register a job on every pod; registering it again with the same settings changes nothing.

        :param incarnation: of a client that has the job already: this pod was restarted, and takes it up again, if
            no other pod knows better (:mod:`refill_service.membership.who_holds`).
        :param num_pods: on which it ran under that name, as far as the client knows.
        """
        known, moves = self._node.jobs.get(spec.name), moves_of(incarnation or "")
        if known is not None and not (moves > known.job.moves and _same_line(known.job.incarnation, incarnation)):
            if incarnation is None or not known.job.moves:
                return await self._register(spec)
            if known.owner.lost:  # and perhaps pod 0 has forgotten about it, too
                return await self.move(spec, known.job.incarnation)
            return await self.register_here(spec, "", "", begun=True) | {"pods": list(self._node.settings.pod_urls)}
        self._node.check_taking_jobs()
        self._node.opening.begin(spec.dataset)
        another_number = num_pods not in (None, self._node.settings.num_pods)
        if incarnation is not None and (another_number or (moves and not self._has_whole(spec.name, incarnation))):
            return await self.move(spec, incarnation)
        if incarnation is not None:
            await self.who_holds.check_brought(spec.name, spec.holder, incarnation)
            return await self.register_here(spec, incarnation, "", begun=True) | {
                "pods": list(self._node.settings.pod_urls)
            }
        telling = asyncio.create_task(self._tell_others(spec))
        try:
            return await self._register(spec)
        finally:
            await telling

    def _has_whole(self, name: str, incarnation: str) -> bool:
        """Whether this pod's journal is enough to go on with a job that has moved, whatever others know."""
        kept = self._node.journal.find(name)
        return (
            kept is not None
            and kept.whole
            and kept.header["incarnation"] == incarnation
            and kept.header["num_pods"] == self._node.settings.num_pods
        )

    async def _tell_others(self, spec: JobSpec) -> None:
        """That they may open the dataset; what is wrong with them is found when they are to register the job."""
        with contextlib.suppress(RefillError):
            body = {"dataset": spec.dataset}
            await self._node.peers.call_all(self._node.others, "POST", f"/peer/v1/jobs/{spec.name}/opening", body)

    async def _register(self, spec: JobSpec) -> dict[str, Any]:
        ordinal, path = self._node.settings.ordinal, f"/peer/v1/jobs/{spec.name}"
        leader: dict[str, Any] = {"incarnation": "", "fingerprint": "", "begun": False, "created": False}
        if ordinal != _LEADER:
            leader = await self._node.peers.call(_LEADER, "PUT", path, {"spec": spec.to_dict()})
        created = leader["created"]
        try:
            info = await self.register_here(spec, leader["incarnation"], leader["fingerprint"], begun=leader["begun"])
            created = created or info.pop("created")
            body = {
                "spec": spec.to_dict(),
                "incarnation": info["incarnation"],
                "fingerprint": info["fingerprint"],
                "begun": leader["begun"] or info["begun"],
            }
            others = [pod for pod in self._node.others if pod != _LEADER]
            await self._node.peers.call_all(others, "PUT", path, body)
        except RefillError as error:
            # One pod refuses it for good: the others must not keep it, or its name and memory would be taken.
            if created and error.status != 503 and not isinstance(error, JobError):
                with contextlib.suppress(RefillError):
                    await self._node.remove_everywhere(spec.name, spec.holder)
            raise
        return info | {"pods": list(self._node.settings.pod_urls)}

    async def register_here(
        self, spec: JobSpec, incarnation: str, fingerprint: str, *, begun: bool = False
    ) -> dict[str, Any]:
        """Register a job on this pod only.

        :param incarnation: as another pod or a client names it; empty: whatever it is here, a new one if need be.
        :param fingerprint: of the dataset as another pod read it; empty: any.
        :param begun: whether ranks were seen to ask for samples: then a pod that does not know the job has lost it.
        """
        async with self._registering:
            known = self._node.jobs.get(spec.name)
            if known is not None and _moved_on(known.job.incarnation, incarnation):
                check_holder(spec.name, known.job.spec.holder, spec.holder)
                await self._node.forget(spec.name)  # who was told of the later name takes nothing from this one
                known = None
            created = known is None
            if known is None:
                known = await self._create_or_take_up(spec, incarnation, begun)
        check_holder(spec.name, known.job.spec.holder, spec.holder)
        if incarnation and known.job.incarnation != incarnation and known.owner.lost:
            raise known.owner.recovering()  # a rank left over from before brought it, and no other pod has confirmed it
        if differences := known.job.spec.differences(spec):
            raise JobConflict(
                f"job {spec.name} was registered before with other settings ({'; '.join(differences)}): "
                "use another name, or end that job first",
                differences=differences,
            )
        if incarnation and known.job.incarnation != incarnation:
            raise self._node.is_another(spec.name)
        info = known.job.info() | {"begun": known.owner.begun or known.recovery is not None, "created": created}
        if fingerprint and info["fingerprint"] != fingerprint:
            raise self._replaced(spec)
        known.job.last_used = time.monotonic()
        return info

    async def _create_or_take_up(self, spec: JobSpec, incarnation: str, begun: bool) -> JobAtPod:
        """A job that this pod does not have: a new one, or one that it lost in a restart."""
        kept = self._node.journal.find(spec.name)
        if kept is not None and incarnation not in ("", kept.header["incarnation"]):
            kept = None  # of an earlier job of that name
        if kept is None and not incarnation and self._node.settings.ordinal == _LEADER:
            elsewhere = await self.who_holds.known_to_others(spec.name, spec.holder)
            incarnation, begun = elsewhere.get("incarnation", ""), elsewhere.get("begun", False)
        if kept is not None and kept.header["num_pods"] != self._node.settings.num_pods and not incarnation:
            elsewhere = await self.who_holds.known_to_others(spec.name, spec.holder)
            if _moved_on(kept.header["incarnation"], elsewhere.get("incarnation", "")):
                kept, incarnation, begun = None, elsewhere["incarnation"], True
        self._check_may_go_on(spec.name, incarnation)
        if kept is not None:
            before = JobSpec.from_dict(kept.header["spec"])
            check_holder(spec.name, before.holder, spec.holder)
            incarnation = kept.header["incarnation"]
            if kept.header["num_pods"] != self._node.settings.num_pods:
                raise self._moved(spec.name, kept.header["num_pods"])
            if differences := before.differences(spec):
                raise self._ran_differently(spec.name, differences)
        lost = kept is not None or begun
        resumed = None if kept is None else kept.resumed
        if resumed is None and is_resumed(incarnation):
            resumed = await self.resumed_at_others(spec.name, incarnation)
        at_pod = await self._node.create(spec, incarnation or uuid.uuid4().hex, kept, resumed, lost=lost)
        try:
            if kept is not None and kept.header["fingerprint"] != at_pod.job.info()["fingerprint"]:
                raise self._replaced(spec)
            if lost:
                self._take_up(at_pod, kept)
            else:
                self._begin_journal(at_pod)
        except BaseException:
            await self._node.close_job(at_pod, self._node.gone(spec.name))
            raise
        self._node.jobs[spec.name] = at_pod
        job = at_pod.job
        log.info(
            "job %s: %s, %d abstract chunks of %d samples, group size %d%s",
            spec.name,
            spec.dataset,
            job.mapping.num_abstract_chunks,
            job.layout.chunk_size,
            job.mapping.group_size,
            ", taken up after a restart" if lost else "",
        )
        return at_pod

    def _check_may_go_on(self, name: str, incarnation: str) -> None:
        """Raises :class:`JobLost` for a job that has ended, or that could not move."""
        if self._node.journal.has_ended(incarnation):
            raise JobLost(f"job {name} was ended: end what is left of it, or use another name", job=name)
        if (why := self._failed_moves.get(incarnation)) is not None:
            raise JobLost(why, job=name)

    async def move(self, spec: JobSpec, incarnation: str) -> dict[str, Any]:
        """Go on with a job that runs, on the pods that there are now, where it ran on more or on fewer before.

        Pod 0 begins it, under the next name of its line, when all the others are there; then ranks are asked what they
        have received (:class:`Recovery`). A job that moved earlier, and that no pod knows any more, moves once more.

        :param incarnation: by which a client knows it.
        """
        node, name = self._node, spec.name
        pods = {"pods": list(node.settings.pod_urls)}
        if node.settings.ordinal != _LEADER:
            body = {"spec": spec.to_dict(), "incarnation": incarnation}
            info = await node.peers.call(_LEADER, "POST", f"/peer/v1/jobs/{name}/move", body)
            return await self.register_here(spec, info["incarnation"], info["fingerprint"], begun=True) | pods
        async with self._registering:
            known = node.jobs.get(name)
            if known is not None:
                check_holder(name, known.job.spec.holder, spec.holder)
            if known is None or _moved_on(known.job.incarnation, incarnation):
                known = await self._begin_to_move(spec, incarnation)
        if not _same_line(known.job.incarnation, incarnation):
            raise node.is_another(name)
        return await self.register_here(spec, known.job.incarnation, "", begun=True) | pods

    async def _begin_to_move(self, spec: JobSpec, incarnation: str) -> JobAtPod:
        node, name, line = self._node, spec.name, line_of(incarnation)
        self._check_may_go_on(name, incarnation)
        kept = node.journal.find(name)
        known, silent = await self.who_holds.known_elsewhere(name, spec.holder)
        if silent:
            raise silent[0]
        if kept is not None:
            known.append(self.known(name))
        of_line = [each for each in known if _same_line(each["incarnation"], incarnation)]
        if any(each["running"] for each in known if each not in of_line):
            raise node.is_another(name)
        moves = max([moves_of(each["incarnation"]) for each in of_line] + [moves_of(incarnation)])
        newest = incarnation_of(line, moves)
        if any(each["knows"] and each["incarnation"] == newest for each in of_line):
            await node.forget(name)  # by an earlier name
            return await self._create_or_take_up(spec, newest, begun=True)
        if kept is not None and not _same_line(kept.header["incarnation"], incarnation):
            kept = None
        if kept is not None:
            check_holder(name, kept.header["spec"].get("holder", ""), spec.holder)
        if kept is not None and (differences := JobSpec.from_dict(kept.header["spec"]).differences(spec)):
            raise self._ran_differently(name, differences)
        resumed = None if kept is None else kept.resumed
        if resumed is None and is_resumed(line):
            resumed = await self.resumed_at_others(name, line)
        await node.forget(name)
        at_pod = await node.create(spec, incarnation_of(line, moves + 1), None, resumed, lost=True)
        if kept is not None and kept.header["fingerprint"] != at_pod.job.info()["fingerprint"]:
            await node.close_job(at_pod, node.gone(name))
            raise self._replaced(spec)
        at_pod.moving = True
        self._take_up(at_pod, None)
        node.jobs[name] = at_pod
        log.warning("job %s ran on another number of pods, and moves to %d", name, node.settings.num_pods)
        return at_pod

    async def register_resumed(self, spec: JobSpec, incarnation: str, resumed: ResumedEpoch) -> dict[str, Any]:
        """Register a job as it goes on from a checkpoint, in place of what it was before, on every pod."""
        await self.replace_here(spec, incarnation, resumed)
        body = {"spec": spec.to_dict(), "incarnation": incarnation}
        await self._node.peers.call_all(self._node.others, "PUT", f"/peer/v1/jobs/{spec.name}/resumed", body)
        return await self._register(spec)

    async def replace_here(self, spec: JobSpec, incarnation: str, resumed: ResumedEpoch | None = None) -> None:
        """:param resumed: None: pod 0 has it."""
        async with self._registering:
            known = self._node.jobs.get(spec.name)
            if (held_by := self._node.job_holder(spec.name)) is not None:
                check_holder(spec.name, held_by, spec.holder)
            if known is not None and known.job.incarnation == incarnation:
                return
            if resumed is None:
                resumed = await self._resumed_at(_LEADER, spec.name, incarnation)
            await self._node.remove(spec.name)
            at_pod = await self._node.create(spec, incarnation, None, resumed, lost=False)
            self._begin_journal(at_pod)
            self._node.jobs[spec.name] = at_pod
            log.info("job %s goes on in epoch %d with %d ranks", spec.name, resumed.epoch, spec.world_size)

    async def resumed_at_others(self, name: str, incarnation: str) -> ResumedEpoch:
        for pod in self._node.others:
            with contextlib.suppress(JobError):
                return await self._resumed_at(pod, name, incarnation)
        raise JobLost(
            f"job {name} had been resumed from a checkpoint, and no pod knows any more from which: resume it again",
            job=name,
        )

    async def _resumed_at(self, pod: int, name: str, incarnation: str) -> ResumedEpoch:
        path = f"/peer/v1/jobs/{name}/resumed"
        return decode_resumed(
            await self._node.peers.get_bytes(pod, f"{path}?incarnation={quote(incarnation, safe='')}")
        )

    def resumed(self, name: str, incarnation: str) -> ResumedEpoch:
        """What was left of the epoch when a job was resumed. Raises :class:`UnknownJob` when this pod can't tell."""
        at_pod = self._node.jobs.get(name)
        kept = self._node.journal.find(name) if at_pod is None else None
        if at_pod is not None and _same_line(at_pod.job.incarnation, incarnation):
            found = at_pod.job.resumed
        elif kept is not None and _same_line(kept.header["incarnation"], incarnation):
            found = kept.resumed
        else:
            found = None
        if found is None:
            raise UnknownJob(f"job {name} was not resumed, as far as is known here", job=name)
        return found

    def known(self, name: str) -> dict[str, Any]:
        """What this pod knows of a job, be it from before a restart. Raises :class:`UnknownJob`.

        ``running``: it is more than a journal. ``knows``: what the job's ranks have received can be learned here, now.
        """
        if name not in self._node.jobs and (kept := self._node.journal.find(name)) is not None:
            return {
                "incarnation": kept.header["incarnation"],
                "holder": kept.header["spec"].get("holder", ""),
                "begun": True,
                "idle": True,
                "running": False,
                "world_size": kept.header["spec"]["world_size"],
                "knows": kept.whole and kept.header["num_pods"] == self._node.settings.num_pods,
            }
        at_pod = self._node.job(name, looked_at=True)
        return {
            "incarnation": at_pod.job.incarnation,
            "holder": at_pod.job.spec.holder,
            "begun": at_pod.owner.begun or at_pod.recovery is not None,
            "idle": self._is_idle(at_pod),
            "running": True,
            "world_size": at_pod.job.spec.world_size,
            "knows": at_pod.has_whole_table or not at_pod.owner.lost,
        }

    async def idle_everywhere(self, name: str) -> bool:
        """Whether a job that is idle here is so at all pods: one that owns little of it, or sends far ahead, is asked
        seldom. A pod that does not answer may be the one that is in use."""
        path = f"/peer/v1/jobs/{name}"
        asked = (self._node.peers.call(pod, "GET", path) for pod in self._node.others)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        at_pod = self._node.jobs.get(name)
        if at_pod is None or not self._is_idle(at_pod):
            return False
        return all(
            isinstance(answer, UnknownJob) or (isinstance(answer, dict) and answer["idle"]) for answer in answers
        )

    def _is_idle(self, at_pod: JobAtPod) -> bool:
        return at_pod.idle_seconds > self._node.settings.job_idle_seconds

    def _take_up(self, at_pod: JobAtPod, kept: KeptJob | None) -> None:
        if kept is not None:
            at_pod.ended |= kept.receipts
            at_pod.has_whole_table = kept.whole
        recovery = Recovery(
            at_pod.job,
            at_pod.owner,
            at_pod.home,
            at_pod.peers,
            kept,
            self._node.settings.recovery_seconds,
            lambda pod: self.introduce(pod, at_pod.job),
            moving=at_pod.moving,
        )
        if recovery.from_journal():
            self._begin_journal(at_pod)
        else:
            at_pod.recovery = asyncio.create_task(self._recover(at_pod, recovery))

    async def _recover(self, at_pod: JobAtPod, recovery: Recovery) -> None:
        name = at_pod.job.spec.name
        try:
            await recovery.from_others(lambda: self._begin_journal(at_pod))
        except (PodUnreachable, JobMoved) as error:  # whoever asks for it will bring it by its latest name
            log.warning("%s: it is asked for anew", error)
            at_pod.recovery = None
            if self._node.jobs.get(name) is at_pod:
                await self._node.forget(name)
        except Exception as error:
            log.error("job %s can't go on after a restart of this pod: %s", name, error, exc_info=not _expected(error))
            at_pod.recovery = None
            if self._node.jobs.get(name) is not at_pod:
                return
            if not at_pod.job.moves:
                await self._node.remove(name)
                return
            if isinstance(error, JobLost) and at_pod.moving:  # told to whoever comes with it; a resumed one is another
                self._failed_moves[at_pod.job.incarnation] = error.message
                while len(self._failed_moves) > _KEPT_FAILURES:
                    self._failed_moves.pop(next(iter(self._failed_moves)))
            await self._node.forget(name)

    def _begin_journal(self, at_pod: JobAtPod) -> None:
        """Not before all is known that is to be in it: what a journal lacks was never delivered."""
        job = at_pod.job
        header = {
            "spec": job.spec.to_dict(),
            "incarnation": job.incarnation,
            "fingerprint": job.info()["fingerprint"],
            "memory_bytes": job.memory_bytes,
            "num_pods": job.num_pods,
            "num_samples": job.layout.num_samples,
        }
        at_pod.owner.journal = self._node.journal.begin(
            job.spec.name, header, at_pod.owner.snapshot, at_pod.owner.live_epochs, job.resumed
        )

    async def introduce(self, pod: int, job: Job) -> None:
        """Tell a pod of a job that it lost in a restart."""
        body = {
            "spec": job.spec.to_dict(),
            "incarnation": job.incarnation,
            "fingerprint": job.info()["fingerprint"],
            "begun": True,
        }
        await self._node.peers.call(pod, "PUT", f"/peer/v1/jobs/{job.spec.name}", body)

    def _moved(self, name: str, num_pods: int) -> JobLost:
        return JobLost(
            f"job {name} ran on {num_pods} pods, and there are {self._node.settings.num_pods} now: resume it from a "
            f"checkpoint (CacheDataset(..., resume=state)), or end it (DELETE /v1/jobs/{name}) and start it anew",
            job=name,
        )

    def _ran_differently(self, name: str, differences: list[str]) -> JobConflict:
        return JobConflict(
            f"job {name} ran before with other settings ({'; '.join(differences)}): use another name, or "
            "end that job first",
            differences=differences,
        )

    def _replaced(self, spec: JobSpec) -> JobConflict:
        return JobConflict(
            f"dataset {spec.dataset} was replaced while job {spec.name} ran: pods read different versions; "
            f"end the job on all pods (DELETE /v1/jobs/{spec.name}), then start it anew"
        )


def _same_line(incarnation: str, other: str | None) -> bool:
    return other is not None and line_of(incarnation) == line_of(other)


def _moved_on(known: str, incarnation: str) -> bool:
    """Whether a job has moved since it was known by the first name."""
    return _same_line(known, incarnation) and moves_of(incarnation) > moves_of(known)


def _expected(error: Exception) -> bool:
    return isinstance(error, RefillError) and error.status < 500
