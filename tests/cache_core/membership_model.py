"""How pods come to have a job, lose it, recover it and move it, without I/O: what decides is their own, in the order in
which ``membership/`` asks it.

A :class:`Place` stands for a pod of the StatefulSet: its volume, and the job as this run of it has it (:class:`Pod`).
What shells do between awaits is done here in one step.
"""

from __future__ import annotations

import itertools
import re

import numpy as np
from tests.cache_core.pod_model import Place, Pod, Shape, Volume

from refill.errors import (
    JobLost,
    PodUnreachable,
    RefillError,
)
from refill.protocol.incarnation import is_later, same_line
from refill.protocol.job_spec import JobSpec
from refill.protocol.records import RecordReader, encode_records
from refill_service.cache_core.job_lifecycle import (
    AskPeers,
    Begin,
    KnownJob,
    Register,
    Wait,
    how_to_begin,
    how_to_move,
    how_to_register,
    is_another,
)
from refill_service.cache_core.recovering import restore
from refill_service.cache_core.sample_mapping import ChunkLayout

PATIENCE_SECONDS = 600.0
LEADER = 0


class MembershipModel:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.runs = itertools.count()
        self.layout = ChunkLayout(np.concatenate([[0], np.cumsum(shape.blobs)]), shape.chunk_size)
        self.lengths = np.random.default_rng(shape.seed).integers(1, 100, self.layout.num_samples)
        self.spec = JobSpec(
            "job",
            "file:///x",
            world_size=shape.num_ranks,
            seed=shape.seed,
            policy=shape.policy,
            num_epochs=shape.num_epochs,
            drop_last=shape.drop_last,
            prefetch_window=shape.window,
        )
        self.memory_bytes = [shape.memory_bytes] * 8
        """Of each pod, from its next run on."""
        self.now = 0.0
        self.lost = ""
        """Why the job can't go on: pods have said so."""
        self.killed: set[int] = set()
        """Ranks whose process was killed at some time."""
        self.known_from: dict[int, int] = {}
        """By rank, the epoch before which pods have said that what it received is unknown."""
        self.incarnation = "a"
        """The line that the job is of."""
        self.pods_of = {"a": shape.num_pods}
        """On how many pods each incarnation ran."""
        self.places = [Place(i, Volume() if shape.journals else None) for i in range(shape.num_pods)]
        for place in self.places:
            place.pod = Pod(self, place, Begin("a", from_journal=False, ran_before=False), None)
            place.pod.begin_journal()

    def register(self, place: Place, brought: str) -> Pod:
        """As ``Registration.register``, with the incarnation that a rank has."""
        ran_on = self.pods_of.get(brought, len(self.places))
        here = None if place.pod is None else place.pod.life
        order = how_to_register(here, place.journal, len(self.places), brought, ran_on)
        if order is Register.MOVE:
            brought = self._move(brought)
        return self._register_here(place, brought)

    def _register_here(self, place: Place, incarnation: str) -> Pod:
        """As ``JobsHere.register``."""
        known = place.pod
        if known is not None and is_later(incarnation, known.job.incarnation):
            place.pod = known = None
        if known is None:
            order = how_to_begin(
                "job",
                place.journal,
                len(self.places),
                incarnation,
                begun=True,
                names_jobs=place.ordinal == LEADER,
            )
            assert order is not AskPeers.WHO_HAS_IT
            known = self._make(place, order)
        if known.job.incarnation != incarnation:
            raise known.later("it is recovering") if known.life.recovering else is_another("job")
        return known

    def _make(self, place: Place, begin: Begin) -> Pod:
        """As ``JobsHere.make``."""
        volume = place.volume if begin.from_journal else None
        journal = volume.found() if volume is not None and not begin.moving else None
        place.pod = pod = Pod(self, place, begin, journal)
        self.pods_of[begin.incarnation] = len(self.places)
        if pod.recovering is not None and (found := pod.recovering.from_journal()) is not None:
            if place.volume is not None:
                pod.receipts |= place.volume.receipts
            pod.carry_out(restore(pod.job, pod.owner, found, ()))
            pod.begin_journal()
        return pod

    def _move(self, brought: str) -> str:
        """As ``Moving.move``, at pod 0. Returns the name that the job has there then."""
        leader = self.places[LEADER]
        if not all(place.up for place in self.places):
            raise PodUnreachable("not all pods answer", pod=LEADER)
        known = leader.pod
        if known is None or is_later(brought, known.job.incarnation):
            elsewhere = [self._known(place) for place in self.places[1:]]
            journal = leader.journal
            enough = journal is not None and journal.whole and journal.num_pods == len(self.places)
            order = how_to_move("job", journal, brought, [each for each in elsewhere if each], enough)
            leader.pod = None
            known = self._make(leader, order) if order.moving else self._register_here(leader, order.incarnation)
        assert same_line(known.job.incarnation, brought)
        return known.job.incarnation

    def _known(self, place: Place) -> KnownJob | None:
        """As ``JobsHere.known``."""
        if place.pod is not None:
            life = place.pod.life
            return KnownJob(place.pod.job.incarnation, begun=life.begun, knows=life.has_records)
        if place.journal is None:
            return None
        knows = place.journal.whole and place.journal.num_pods == len(self.places)
        return KnownJob(place.journal.incarnation, running=False, knows=knows)

    def at_pod(self, ordinal: int, incarnation: str) -> Pod:
        """The job at a pod that another pod asks, which makes it known there if need be."""
        place = self.places[ordinal]
        if not place.up:
            raise PodUnreachable("it is down", pod=ordinal)
        if place.pod is None:
            self._register_here(place, incarnation)
        assert place.pod is not None
        if place.pod.job.incarnation != incarnation:
            raise PodUnreachable("it has the job by another name", pod=ordinal)
        return place.pod

    @property
    def running(self) -> list[Pod]:
        return [place.pod for place in self.places if place.pod is not None]

    def runs_on(self, pod: Pod) -> bool:
        return any(place.pod is pod for place in self.places)

    def kill(self, ordinal: int, *, lose_volume: bool, lost_bytes: int | None = None) -> None:
        """:param lost_bytes: its machine lost power, and with it so much of what was written last; None: it did not."""
        place = self.places[ordinal]
        place.up, place.pod = False, None
        if place.volume is not None:
            if lose_volume:
                place.volume = Volume()
            elif lost_bytes is not None and place.volume.incarnation:
                place.volume.power_is_lost(lost_bytes)

    def come_up(self, ordinal: int) -> None:
        self.places[ordinal].up = True

    def scale(self, num_pods: int) -> None:
        """All pods are replaced by another number. Volumes stay where there are pods."""
        for place in self.places:
            self.kill(place.ordinal, lose_volume=False)
        volumes = [place.volume for place in self.places]
        self.places = [
            Place(i, volumes[i] if i < len(volumes) else (Volume() if self.shape.journals else None))
            for i in range(num_pods)
        ]

    def recovery_round(self, ordinal: int, *, cut_off: frozenset[int] = frozenset()) -> None:
        """As a turn of ``Recovery.from_others``."""
        place = self.places[ordinal]
        pod = place.pod
        if pod is None or pod.recovering is None or not pod.life.recovering:
            return
        recollection, silent = pod.recovering.begin_round(), []
        others = [other for other in range(len(self.places)) if other != ordinal]
        for other in pod.recovering.whom_to_ask(others):
            there = self.places[other]
            if not there.up or other in cut_off:
                silent.append(f"pod {other}")
                continue
            if there.pod is None:
                if pod.recovering.introduces_to(other, self.now):
                    self._introduce(there, pod.job.incarnation)
                    silent.append(f"pod {other}")
                continue
            if there.pod.job.incarnation != pod.job.incarnation:
                if is_later(there.pod.job.incarnation, pod.job.incarnation):
                    place.pod = None  # JobMoved: it is asked for anew
                    return
                self._introduce(there, pod.job.incarnation)
                silent.append(f"pod {other}")
                continue
            records = there.pod.records.records_for(ordinal, str(pod.run), everything=pod.life.moving)
            recollection.add(RecordReader(records), other)
        try:
            step = pod.recovering.end_round(recollection, silent, self.now, PATIENCE_SECONDS)
            if isinstance(step, Wait):
                return
            for dealt in pod.recovering.to_deal(recollection):
                pod.job.move_traces(dealt.epoch, dealt.traces())
        except PodUnreachable:
            place.pod = None
            return
        except JobLost as error:
            self.refused_for_good(error)
            return
        pod.carry_out(restore(pod.job, pod.owner, recollection, step.without))
        pod.begin_journal()
        self.note_unknown()
        if pod.life.unknown:
            for other in others:
                if self.places[other].up and (there_pod := self.places[other].pod) is not None:
                    there_pod.records.unknown[ordinal] = encode_records(pod.life.unknown.records())

    def refused_for_good(self, error: RefillError) -> None:
        """As docs/CORRECTNESS.md says: a job can't move when it is not known what a rank had, or one does not come
        back. Nothing else refuses a rank for good."""
        resumed = re.search(r"rank (\d+) was resumed within epoch (\d+)", error.message)
        within = resumed is not None and self.may_lack(int(resumed[1]), int(resumed[2]))
        waited_long = any(pod.life.moving and pod.waited_long for pod in self.running)
        silent = waited_long and "did not tell what had been received" in error.message
        if not (isinstance(error, JobLost) and "can't move to" in error.message and (within or silent or self.lost)):
            raise AssertionError(f"refused for good: {error}") from error
        self.lost = error.message

    def may_lack(self, rank: int, epoch: int) -> bool:
        """Whether a process may be this rank that does not know all that the rank had, or pods have said so."""
        return rank in self.killed or self.is_unknown(epoch, rank)

    def note_unknown(self) -> None:
        for pod in self.running:
            for rank, epoch in pod.life.unknown.by_rank().items():
                self.known_from[rank] = max(epoch, self.known_from.get(rank, 0))

    def is_unknown(self, epoch: int, rank: int) -> bool:
        """Whether pods have said that they can't know all that the rank received in an epoch."""
        return epoch < self.known_from.get(rank, 0)

    def anything_unknown(self, epoch: int) -> bool:
        return any(epoch < known_from for known_from in self.known_from.values())

    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for pod in self.running:
            pod.waited_long |= seconds > PATIENCE_SECONDS and pod.life.recovering

    def _introduce(self, place: Place, incarnation: str) -> None:
        try:
            self._register_here(place, incarnation)
        except RefillError:
            return
