"""Pods and ranks of a job without I/O: all that decides is the pods' own, driven as pods drive it; messages, reads,
time and what is lost are a test's.

A :class:`Place` stands for a pod of the StatefulSet: its volume, and the job as this run of it has it (:class:`Pod`).
What shells do between awaits is done here in one step; what they await is a message that a test delivers, or loses.
:class:`JobModel` checks what ranks have received, with no word of the pods believed.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from pod_model import Asked, Int64s, Message, Place, Pod, Process, Shape, Volume

from refill.errors import (
    EpochEnded,
    InvalidInput,
    JobConflict,
    JobLost,
    PodUnreachable,
    RecordsWanted,
    RefillError,
)
from refill.protocol.incarnation import is_later, moves_of, same_line
from refill.protocol.job_spec import JobSpec
from refill.protocol.records import Kind, Record, RecordReader, encode_records
from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.home_machine import Entry, SentAhead
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
from refill_service.cache_core.job_state import JobState
from refill_service.cache_core.receipt import EpochReceipt, sum_of_receipts
from refill_service.cache_core.recovering import restore
from refill_service.cache_core.sample_mapping import ChunkLayout

PATIENCE_SECONDS = 600.0
LEADER = 0


class JobModel:
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
        self.incarnation = "a"
        self.now = 0.0
        self.lost = ""
        """Why the job can't go on: pods have said so."""
        self.anything_unknown = False
        self.any_process_killed = False
        self.num_receipts = 0
        """That were held against what came."""
        self.places = [Place(i, Volume() if shape.journals else None) for i in range(shape.num_pods)]
        for place in self.places:
            place.pod = Pod(self, place, Begin("a", from_journal=False, ran_before=False), None)
            place.pod.begin_journal()
        self.processes = [Process(rank, "a") for rank in range(shape.num_ranks)]
        self.epochs = [0] * shape.num_ranks
        """That each rank is in."""
        self.asked: list[Asked] = []
        self.messages: list[Message] = []
        self.responses: list[Asked] = []
        self.got: list[dict[tuple[int, int], int]] = [{} for _ in range(shape.num_epochs)]
        """By epoch: what each (rank, position) has received, and has not to ask for again."""
        self.ever_got: list[dict[tuple[int, int], int]] = [{} for _ in range(shape.num_epochs)]
        """The same, and what processes received that were killed since."""
        self.first_traces = [self._traces(epoch) for epoch in range(shape.num_epochs)]

    def _traces(self, epoch: int) -> Traces:
        traces = JobState(self.spec, self.layout, ordinal=0, num_pods=1, incarnation="x").known_traces(epoch)
        assert traces is not None
        return traces

    def length(self, epoch: int, rank: int) -> int:
        return self.first_traces[epoch].length(rank)

    def missing(self, epoch: int, rank: int) -> Int64s:
        had = self.got[epoch]
        return np.array([p for p in range(self.length(epoch, rank)) if (rank, p) not in had], dtype=np.int64)

    # A rank asks

    def ask(self, rank: int, positions: Int64s, *, silent: bool = False, cut_off: frozenset[int] = frozenset()) -> bool:
        """A batch of a rank. False when it is refused for now: it asks again.

        :param silent: it does not report what it has received, should it be asked to.
        :param cut_off: pods that the home does not reach.
        """
        process, epoch = self.processes[rank], self.epochs[rank]
        try:
            pod = self._home_of(process, silent=silent)
            asked = self._open_batch(pod, process, epoch, positions, cut_off)
        except (EpochEnded, InvalidInput, JobConflict, JobLost) as error:
            if self.lost or self.anything_unknown or self.any_process_killed:
                self.lost = error.message  # it is where nobody remembers that ranks are
                return False
            raise AssertionError(f"rank {rank} was refused for good in epoch {epoch}: {error}") from error
        except RefillError:
            return False
        if asked is None:
            return False
        self.asked.append(asked)
        self._go_on(asked)
        return True

    def _home_of(self, process: Process, *, silent: bool) -> Pod:
        """The rank's home, which knows the job and what the rank has received by then."""
        place = self.places[process.rank % len(self.places)]
        if not place.up:
            raise PodUnreachable("it is down", pod=place.ordinal)
        pod = place.pod
        if pod is None or pod.job.incarnation != process.incarnation:
            if pod is None or not is_later(pod.job.incarnation, process.incarnation):
                pod = self._register(place, process)
            if moves_of(pod.job.incarnation) < process.moves:
                raise PodUnreachable("it does not know yet that the job has moved", pod=place.ordinal)
            process.incarnation = pod.job.incarnation
        try:
            pod.record.check_reported(process.rank)
        except RecordsWanted:
            if silent:
                raise
            self._report(pod, process)
            pod.record.check_reported(process.rank)
        return pod

    def _report(self, pod: Pod, process: Process) -> None:
        report = pod.record.report_of(process.rank)
        for record in RecordReader(encode_records(process.report(moves_of(process.incarnation)))):
            report.add(record)
            if record.kind is Kind.WHOLE:
                self._says_all_since(process, record.epoch)
        report.ended()

    def _says_all_since(self, process: Process, since: int) -> None:
        """What a process before it had received after its checkpoint may go to others from now on."""
        for epoch in range(since, self.shape.num_epochs):
            known, had = process.received.get(epoch, {}), self.ever_got[epoch]
            for key in [key for key in had if key[0] == process.rank and key[1] not in known]:
                if key not in self.got[epoch]:
                    del had[key]

    def _register(self, place: Place, process: Process) -> Pod:
        """As ``Registration.register``, with the incarnation that the rank has."""
        brought, ran_on = process.incarnation, self.num_pods_known(process)
        here = None if place.pod is None else place.pod.life
        order = how_to_register(here, place.journal, len(self.places), brought, ran_on)
        if order is Register.MOVE:
            brought = self._move(brought)
        return self._register_here(place, brought)

    def num_pods_known(self, process: Process) -> int:
        return self.pods_of[process.incarnation] if process.incarnation in self.pods_of else len(self.places)

    @property
    def pods_of(self) -> dict[str, int]:
        """On how many pods each incarnation ran."""
        return self.__dict__.setdefault("_pods_of", {"a": self.shape.num_pods})

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
        journal = place.volume.found() if begin.from_journal and not begin.moving and place.volume else None
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

    def _at(self, ordinal: int, incarnation: str) -> Pod:
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

    def _open_batch(
        self, pod: Pod, process: Process, epoch: int, positions: Int64s, cut_off: frozenset[int]
    ) -> Asked | None:
        """As ``Home.open``, then what ``Home.assemble`` begins with."""
        rank, life = process.rank, pod.life
        if life.recovering and not (life.ranks.begun and life.ranks.may_ask(epoch)):
            raise pod.later("it is recovering")
        asked, repeats = pod.traces(epoch).asked(rank, positions)
        if pod.home.entry(epoch, rank) is not Entry.KNOWN:
            pod.carry_out(pod.owner.rank_came(epoch, rank, pod.job.ordinal))
            for other in range(len(self.places)):
                if other != pod.job.ordinal:
                    if other in cut_off:
                        raise PodUnreachable("it is cut off", pod=other)
                    self._at(other, pod.job.incarnation).rank_opens(epoch, rank, pod.job.ordinal)
            pod.home.entered(epoch, rank)
            pod.record.rank_opened(rank)
        own_epoch = pod.open(epoch, rank) if pod.job.share.holds(asked).any() else None
        batch = pod.home.begin(epoch, rank, positions, asked, repeats)
        found = Asked(pod, process, process.reports, moves_of(pod.job.incarnation), batch)
        if len(batch.repeats):
            batch.put(batch.repeats, asked[batch.repeats], asked[batch.repeats].tolist())
        for owner, places in batch.of_owners.items():
            self._send(found, owner, places, len(batch.of_owners))
        if len(batch.own):
            assert own_epoch is not None
            answers, orders = pod.owner.requested(own_epoch, rank, asked[batch.own])
            pod.carry_out(orders)
            if answers is None:
                self.give_up(found)
                return None
            samples = answers.samples + pod.job.share.first_sample
            batch.put(batch.own, samples, samples.tolist())
        return found

    def _send(self, asked: Asked, owner: int, places: Int64s, owners_left: int) -> None:
        request = asked.pod.home.ask(asked.batch, owner, places, owners_left)
        self.messages.append(Message(asked, request, places, asked.pod.record.restarts_of(owner)))

    def give_up(self, asked: Asked) -> None:
        if not asked.given_up and not asked.complete:
            asked.given_up = True
            asked.pod.home.over(asked.batch)
            self.asked = [each for each in self.asked if each is not asked]

    def _go_on(self, asked: Asked) -> None:
        """As ``Home.assemble`` does when something has come."""
        batch = asked.batch
        if asked.given_up or asked.complete:
            return
        under_way = {message.request for message in self.messages}
        if batch.awaited and not asked.awaited_ended and under_way.isdisjoint(batch.awaited):
            asked.awaited_ended = True
            lost = asked.pod.home.arrived(batch)
            for owner, places in lost.items():
                self._send(asked, owner, places, len(lost))
        if None not in batch.found:
            asked.complete = True
            asked.pod.home.complete(batch, 0)
            asked.pod.home.over(batch)
            self.asked = [each for each in self.asked if each is not asked]
            self.responses.append(asked)

    # Messages

    def message_moves(self, message: Message, *, lost: bool) -> None:
        """The next step of a message: the owner answers, the first two frames arrive, the third does."""
        home = message.asked.pod
        if not self._runs(home):
            self.messages.remove(message)  # the run that asked is gone
            return
        if not message.answered:
            lost = lost or not self._owner_answers(message)
            message.answered = True
        elif not message.first_frames_came:
            lost = lost or not self._first_frames_come(message)
            message.first_frames_came = True
        else:
            self._ends(message, [] if lost or not self._came(message, of_ahead=True) else message.ahead)
            return
        if lost:
            self._ends(message, [])
            self.give_up(message.asked)

    def _ends(self, message: Message, ahead: list[SentAhead[int]]) -> None:
        self.messages.remove(message)
        message.asked.pod.home.ended(message.request, ahead)
        for asked in [*self.asked]:
            if message.request in asked.batch.awaited:
                self._go_on(asked)

    def _owner_answers(self, message: Message) -> bool:
        wire, home = message.request.wire, message.asked.pod
        try:
            pod = self._at(message.request.pod, home.job.incarnation)
            asked, repeats = pod.traces(wire.epoch).asked(wire.rank, wire.positions)
            assert not repeats.any(), "an owner is asked for a repeat"
            assert pod.job.share.holds(asked).all(), "an owner is asked for what it does not own"
            epoch = pod.open(wire.epoch, wire.rank)
        except EpochEnded as error:
            assert self.anything_unknown or self.any_process_killed, (
                f"epoch {wire.epoch} was ended while it is asked for"
            )
            self.lost = error.message  # nobody remembers that a rank is in it
            return False
        except RefillError:
            return False
        answers, orders = pod.owner.requested(epoch, wire.rank, asked)
        pod.carry_out(orders)
        if answers is None:
            return False
        first = pod.job.share.first_sample
        message.samples = answers.samples + first
        _, ahead, orders = pod.owner.answer_left(
            wire.epoch, wire.rank, asked, wire.ahead_from, wire.room_bytes, wire.started_below
        )
        pod.carry_out(orders)
        sizes = self.lengths[ahead.samples + first].tolist()
        assert sum(sizes) <= wire.room_bytes, "more was sent ahead than there was room for"
        entries = zip(ahead.positions.tolist(), sizes, (ahead.samples + first).tolist(), strict=True)
        message.ahead = [SentAhead(position, sample, size, sample) for position, size, sample in entries]
        return True

    def _first_frames_come(self, message: Message) -> bool:
        asked = message.asked
        asked.pod.home.announced(message.request, np.array([each.position for each in message.ahead], dtype=np.int64))
        if not self._came(message, of_ahead=False):
            return False
        assert message.samples is not None
        if not asked.given_up:
            asked.batch.put(message.places, message.samples, message.samples.tolist())
            self._go_on(asked)
        return True

    def _came(self, message: Message, *, of_ahead: bool) -> bool:
        wire, record = message.request.wire, message.asked.pod.record
        positions, samples = wire.positions, message.samples
        if of_ahead:
            positions = np.array([each.position for each in message.ahead], dtype=np.int64)
            samples = np.array([each.sample_id for each in message.ahead], dtype=np.int64)
        assert samples is not None
        try:
            record.came(message.request.pod, message.restarts, wire, positions, samples)
        except PodUnreachable:
            return False
        return True

    def response_arrives(self, asked: Asked, *, lost: bool = False) -> None:
        """At the training process, if it is still there."""
        self.responses.remove(asked)
        process, batch = asked.process, asked.batch
        # When its home is gone, its connection broke.
        if lost or not self._runs(asked.pod) or self.processes[batch.rank] is not process:
            return
        if process.reports != asked.reports or process.moves > asked.moves:
            return  # it has said meanwhile that this had not come
        process.add(batch.epoch, batch.positions, batch.sample_ids)
        for position, sample in zip(batch.positions.tolist(), batch.sample_ids.tolist(), strict=True):
            self.got[batch.epoch][batch.rank, position] = sample
            before = self.ever_got[batch.epoch].setdefault((batch.rank, position), sample)
            if not self.anything_unknown:
                assert before == sample, f"rank {batch.rank} position {position} got {before}, asked again {sample}"

    def deliver_all(self) -> None:
        """Until nothing is under way."""
        while self.messages or self.responses:
            for message in [*self.messages]:
                if message in self.messages:
                    self.message_moves(message, lost=False)
            for asked in [*self.responses]:
                self.response_arrives(asked)

    # Pods

    def read_ends(self, pod: Pod, which: int, *, fails: bool) -> None:
        epoch, read = pod.reading.pop(which % len(pod.reading))
        pod.carry_out(pod.owner.failed(epoch, read) if fails else pod.owner.arrived(epoch, read))

    def all_reads_end(self) -> None:
        for pod in self.running:
            while pod.reading:
                self.read_ends(pod, 0, fails=False)

    @property
    def running(self) -> list[Pod]:
        return [place.pod for place in self.places if place.pod is not None]

    def _runs(self, pod: Pod) -> bool:
        return any(place.pod is pod for place in self.places)

    def kill(self, ordinal: int, *, lose_volume: bool, lost_bytes: int | None = None) -> None:
        """:param lost_bytes: its machine lost power, and with it so much of what was written last; None: it did not."""
        place = self.places[ordinal]
        if place.pod is not None:
            for asked in [each for each in self.asked if each.pod is place.pod]:
                self.asked.remove(asked)
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
            self.lost = error.message
            return
        pod.carry_out(restore(pod.job, pod.owner, recollection, step.without))
        pod.begin_journal()
        if pod.life.unknown:
            self.anything_unknown = True
            for other in others:
                if self.places[other].up and (there_pod := self.places[other].pod) is not None:
                    there_pod.records.unknown[ordinal] = encode_records(pod.life.unknown.records())

    def _introduce(self, place: Place, incarnation: str) -> None:
        try:
            self._register_here(place, incarnation)
        except RefillError:
            return

    def all_recover(self) -> None:
        """Everybody is there, and reports."""
        for place in self.places:
            place.up = True
        for turn in range(60):
            for place in self.places[turn % len(self.places) :] + self.places[: turn % len(self.places)]:
                self.recovery_round(place.ordinal)
                if self.lost:
                    return
                for process in self.processes:
                    if process.rank % len(self.places) == place.ordinal:
                        self._asks_whether_known(process)
            homes = {process.rank % len(self.places) for process in self.processes}
            if all(self.places[home].pod is not None for home in homes) and not any(
                pod.life.recovering for pod in self.running
            ):
                return
            self.now += 0.25 if turn < 20 else 3 if turn < 50 else PATIENCE_SECONDS
        raise AssertionError(f"pods never recover: {[(pod.job.ordinal, pod.life.waits_for) for pod in self.running]}")

    def _asks_whether_known(self, process: Process) -> None:
        try:
            self._home_of(process, silent=False)
        except JobLost as error:
            self.lost = error.message
        except RefillError:
            pass

    # Ranks

    def process_is_killed(self, rank: int, position: int) -> None:
        """Another one goes on in its place from a checkpoint here, and knows nothing of what came before."""
        self.any_process_killed = True
        epoch, incarnation = self.epochs[rank], self.processes[rank].incarnation
        self.processes[rank] = Process(rank, incarnation, since=epoch + 1 if position else 0)
        for key in [key for key in self.got[epoch] if key[0] == rank and key[1] >= position]:
            del self.got[epoch][key]

    def observed(self, rank: int) -> None:
        """A process that has received nothing as this rank says so to its home, and nothing else."""
        pod = self.places[rank % len(self.places)].pod
        if pod is not None and not pod.record.is_reported(rank):
            report = pod.record.report_of(rank)
            report.add(Record(Kind.UNUSED, 0, rank))
            report.ended()

    def looks_after_home(self, rank: int) -> None:
        """As ``JobPods.look_after_home``: it hears what is unknown."""
        process = self.processes[rank]
        try:
            pod = self._home_of(process, silent=False)
        except RefillError:
            return
        process.since = max(process.since, pod.records.unknown_before().get(rank, 0))

    # What must hold

    def check(self) -> None:
        for pod in self.running:
            memory = pod.home.remote_memory
            assert memory.used + memory.granted <= memory.capacity, "remote memory above its limit"
        if self.anything_unknown:
            return
        for epoch, got in enumerate(self.ever_got):
            may_come = self.multiplicity(epoch)
            came = Counter(got.values())
            twice = [sample for sample, count in came.items() if count > may_come[sample]]
            assert not twice, f"epoch {epoch}: samples {twice} came more often than they were asked for"

    def multiplicity(self, epoch: int) -> Counter[int]:
        """How often each sample may come: once, and as often as positions repeat it."""
        traces, found = self.first_traces[epoch], Counter(range(self.layout.num_samples))
        for rank in range(self.spec.world_size):
            asked, repeats = traces.asked(rank, np.arange(traces.length(rank)))
            found.update(asked[repeats].tolist())
        return found

    def receipt(self, epoch: int) -> EpochReceipt | None:
        """As ``JobAtPod.receipt``; None where a pod does not know any more."""
        parts = [pod.receipt(epoch) for pod in self.running]
        total = sum_of_receipts([part for part in parts if part is not None])
        for pod in self.running:
            total = total.without(pod.home.unused_ahead(epoch))
        return None if None in parts or len(parts) < len(self.places) else total

    def finish_epoch(self, epoch: int) -> None:
        """All ranks ask for what they lack of an epoch; nothing is lost any more. Then the receipt is held against what
        came."""
        for _ in range(60):
            self.all_recover()
            if self.lost:
                return
            lacks = {rank: self.missing(self.epochs[rank], rank) for rank in range(self.spec.world_size)}
            if not any(len(lacks[rank]) for rank in lacks if self.epochs[rank] == epoch):
                break
            for (
                rank,
                positions,
            ) in lacks.items():  # of those that are ahead, too: pods may have forgotten where they are
                if len(positions):
                    self.ask(rank, positions)
                    self.deliver_all()
            self.all_reads_end()
        else:
            raise AssertionError(f"epoch {epoch} does not end")
        self.check()

    def check_epoch(self, epoch: int) -> None:
        """An epoch that all ranks have asked for to its end, against its receipt."""
        came = Counter(self.got[epoch].values())
        twice = (came - self.multiplicity(epoch)).total()
        if not self.anything_unknown:
            assert not twice, f"epoch {epoch}: {twice} samples came more often than they were asked for"
        if (receipt := self.receipt(epoch)) is None:
            return
        self.num_receipts += 1
        assert receipt.missing == 0, f"epoch {epoch}: nothing is missing, and its receipt says {receipt}"
        assert receipt.duplicates + receipt.unknown >= twice, f"epoch {epoch}: {twice} came twice, and {receipt}"
        if not self.anything_unknown:
            assert receipt.exact, f"epoch {epoch} was exact, and its receipt says {receipt}"
