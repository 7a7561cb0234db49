"""Ranks ask their homes, homes ask owners, answers come or are lost: without I/O, as the client, ``jobs/home.py`` and
``jobs/owner.py`` do it. What they await is a message that a test delivers, or loses."""

from __future__ import annotations

import numpy as np
from tests.cache_core.membership_model import MembershipModel
from tests.cache_core.pod_model import Asked, Int64s, Message, Pod, Process, Shape

from refill.errors import (
    EpochEnded,
    InvalidInput,
    JobConflict,
    JobLost,
    PodUnreachable,
    RecordsWanted,
    RefillError,
)
from refill.protocol.incarnation import is_later, moves_of
from refill.protocol.records import Kind, RecordReader, encode_records
from refill_service.cache_core.home_machine import Entry, SentAhead


class RequestsModel(MembershipModel):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
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
            self.refused_for_good(error)
            return False
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
                pod = self.register(place, process.incarnation)
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
                    self.at_pod(other, pod.job.incarnation).rank_opens(epoch, rank, pod.job.ordinal)
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
                raise EpochEnded("it was left before its end")
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

    def message_moves(self, message: Message, *, lost: bool) -> None:
        """The next step of a message: the owner answers, the first two frames arrive, the third does."""
        home = message.asked.pod
        if not self.runs_on(home):
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
            pod = self.at_pod(message.request.pod, home.job.incarnation)
            asked, repeats = pod.traces(wire.epoch).asked(wire.rank, wire.positions)
            assert not repeats.any(), "an owner is asked for a repeat"
            assert pod.job.share.holds(asked).all(), "an owner is asked for what it does not own"
            epoch = pod.open(wire.epoch, wire.rank)
        except EpochEnded as error:
            self.refused_for_good(error)
            return False
        except RefillError:
            return False
        answers, orders = pod.owner.requested(epoch, wire.rank, asked)
        pod.carry_out(orders)
        if answers is None:
            self.refused_for_good(EpochEnded("it was left before its end"))
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
        if lost or not self.runs_on(asked.pod) or self.processes[batch.rank] is not process:
            return
        if process.reports != asked.reports or process.moves > asked.moves:
            return  # it has said meanwhile that this had not come
        process.add(batch.epoch, batch.positions, batch.sample_ids)
        for position, sample in zip(batch.positions.tolist(), batch.sample_ids.tolist(), strict=True):
            self.got[batch.epoch][batch.rank, position] = sample
            before = self.ever_got[batch.epoch].setdefault((batch.rank, position), sample)
            self.note_unknown()
            if not self.is_unknown(batch.epoch, batch.rank):
                assert before == sample, f"rank {batch.rank} position {position} got {before}, asked again {sample}"

    def deliver_all(self) -> None:
        """Until nothing is under way."""
        while self.messages or self.responses:
            for message in [*self.messages]:
                if message in self.messages:
                    self.message_moves(message, lost=False)
            for asked in [*self.responses]:
                self.response_arrives(asked)

    def read_ends(self, pod: Pod, which: int, *, fails: bool) -> None:
        epoch, read = pod.reading.pop(which % len(pod.reading))
        pod.carry_out(pod.owner.failed(epoch, read) if fails else pod.owner.arrived(epoch, read))

    def all_reads_end(self) -> None:
        for pod in self.running:
            while pod.reading:
                self.read_ends(pod, 0, fails=False)
