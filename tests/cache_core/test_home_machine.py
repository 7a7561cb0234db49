"""What a home decides, without a pod: whatever owners and ranks do, each position is answered by one sample, its own,
and what is sent ahead never takes more than its memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.draws import draws

from refill_service.cache_core.home_machine import Batch, Entry, HomeMachine, OwnerRequest, SentAhead

NUM_PODS, OF_EACH = 3, 40
BOUNDS = np.arange(0, OF_EACH * NUM_PODS + 1, OF_EACH)
NO_REPEATS = np.zeros(OF_EACH * NUM_PODS, dtype=bool)


def home(remote_bytes: int = 1000) -> HomeMachine[bytes]:
    return HomeMachine(0, BOUNDS, remote_bytes)


def ask(machine: HomeMachine[bytes], *asked: int, rank: int = 0, epoch: int = 0, first: int = 0) -> Batch[bytes]:
    """A batch of a rank, whose first position is ``first``."""
    return machine.begin(epoch, rank, np.arange(first, first + len(asked)), np.array(asked), NO_REPEATS[: len(asked)])


def the_request(machine: HomeMachine[bytes], batch: Batch[bytes]) -> OwnerRequest:
    ((pod, places),) = batch.of_owners.items()
    return machine.ask(batch, pod, places)


def sent(position: int, num_bytes: int = 10) -> SentAhead[bytes]:
    return SentAhead(position, 1000 + position, num_bytes, b"x" * num_bytes)


def announced(machine: HomeMachine[bytes], request: OwnerRequest, *positions: int) -> None:
    machine.announced(request, np.array(positions, dtype=np.int64))


class TestPlan:
    def test_positions_go_to_who_owns_what_they_ask_for(self) -> None:
        batch = ask(home(), 5, 45, 85, 6, 46)
        assert batch.own.tolist() == [0, 3]
        assert {pod: places.tolist() for pod, places in batch.of_owners.items()} == {1: [1, 4], 2: [2]}
        assert len(batch.repeats) == 0

    def test_repeats_are_read_by_themselves_whoever_owns_them(self) -> None:
        repeats = np.array([False, True, True])
        batch = home().begin(0, 0, np.arange(3), np.array([5, 45, 6]), repeats)
        assert (batch.own.tolist(), batch.repeats.tolist(), batch.of_owners) == ([0], [1, 2], {})

    def test_one_pod_answers_all(self) -> None:
        machine: HomeMachine[bytes] = HomeMachine(0, np.array([0, 9]), 0)
        assert ask(machine, 3, 2, 8).own.tolist() == [0, 1, 2]

    def test_what_was_sent_ahead_is_there_and_asked_of_nobody(self) -> None:
        machine = home()
        machine.ended(the_request(machine, ask(machine, 45)), [sent(1), sent(2)])
        batch = ask(machine, 46, 47, 48, first=1)
        assert [batch.found[0], batch.found[1]] == [b"x" * 10, b"x" * 10]
        assert batch.sample_ids[:2].tolist() == [1001, 1002]
        assert batch.of_owners[1].tolist() == [2]
        assert machine.remote_memory.used == 0

    def test_a_batch_is_complete_when_each_position_has_its_sample_once(self) -> None:
        batch = ask(home(), 1, 2)
        batch.put(np.array([1]), np.array([7]), [b"b"])
        with pytest.raises(RuntimeError, match="1 samples missing"):
            batch.payloads  # noqa: B018
        with pytest.raises(RuntimeError, match="position 1 of rank 0 was answered twice"):
            batch.put(np.array([1]), np.array([8]), [b"c"])
        with pytest.raises(RuntimeError, match="1 positions of rank 0 were answered by 2 samples"):
            batch.put(np.array([0]), np.array([8, 9]), [b"c", b"d"])
        batch.put(np.array([0]), np.array([6]), [b"a"])
        assert batch.payloads == [b"a", b"b"]


class TestRoom:
    def test_owners_that_are_asked_together_get_even_parts(self) -> None:
        machine = home(1000)
        batch = ask(machine, 45, 85)
        assert machine.ask(batch, 1, batch.of_owners[1], 2).wire.room_bytes == 500
        assert machine.ask(batch, 2, batch.of_owners[2], 1).wire.room_bytes == 500
        assert machine.ask(batch, 2, batch.of_owners[2], 1).wire.room_bytes == 0

    def test_a_request_that_ends_badly_gives_its_room_back(self) -> None:
        machine = home(1000)
        machine.ended(the_request(machine, ask(machine, 45)))
        assert the_request(machine, ask(machine, 46, first=1)).wire.room_bytes == 1000

    def test_what_an_owner_sends_past_its_room_is_refused_and_the_rest_kept(self) -> None:
        machine = home(25)
        request = the_request(machine, ask(machine, 45))
        assert machine.ended(request, [sent(1), sent(2), sent(3)]) == (2, 1)
        assert (machine.remote_memory.used, machine.remote_memory.granted) == (20, 0)
        assert ask(machine, 46, 47, 48, first=1).of_owners[1].tolist() == [2], "asked on demand"

    def test_what_follows_is_sent_ahead_from_behind_the_batches_of_the_ranks_other_workers(self) -> None:
        machine = home()
        first, second = ask(machine, 45, 46), ask(machine, 47, 48, first=2)
        assert the_request(machine, second).wire.ahead_from == 4 + 2
        machine.over(first)
        machine.over(second)
        assert the_request(machine, ask(machine, 49, first=4)).wire.ahead_from == 5 + 1, "it still has two"

    def test_with_one_worker_it_is_sent_from_the_next_position(self) -> None:
        machine = home()
        for position in range(4):
            batch = ask(machine, 45 + position, first=position)
            wire = the_request(machine, batch).wire
            assert (wire.ahead_from, wire.started_below) == (position + 1, position + 1)
            machine.over(batch)


class TestOnTheWay:
    def test_who_asks_for_what_is_announced_waits_for_it(self) -> None:
        machine = home()
        request = the_request(machine, ask(machine, 45))
        announced(machine, request, 1, 2)
        batch = ask(machine, 46, 47, 48, first=1)
        assert list(batch.awaited) == [request]
        assert batch.of_owners[1].tolist() == [2]
        assert machine.ended(request, [sent(1), sent(2)]) == (2, 0)
        assert machine.arrived(batch) == {}
        assert batch.sample_ids[:2].tolist() == [1001, 1002]

    def test_what_was_lost_on_the_way_is_asked_for(self) -> None:
        machine = home()
        request = the_request(machine, ask(machine, 45))
        announced(machine, request, 1, 2)
        batch = ask(machine, 46, 85, first=1)
        assert batch.of_owners == {}
        machine.ended(request)
        lost = machine.arrived(batch)
        assert {pod: places.tolist() for pod, places in lost.items()} == {1: [0], 2: [1]}

    def test_what_was_asked_for_meanwhile_is_refused(self) -> None:
        machine = home()
        request = the_request(machine, ask(machine, 45))
        ask(machine, 46, first=1)
        assert machine.ended(request, [sent(1), sent(2)]) == (1, 1)

    def test_what_two_answers_bring_is_kept_once(self) -> None:
        machine = home()
        first, second = the_request(machine, ask(machine, 45)), the_request(machine, ask(machine, 46, first=1))
        assert machine.ended(first, [sent(5)]) == (1, 0)
        assert machine.ended(second, [sent(5)]) == (0, 1)

    def test_an_announcement_of_a_later_answer_outlives_the_end_of_an_earlier_one(self) -> None:
        machine = home()
        first, second = the_request(machine, ask(machine, 45)), the_request(machine, ask(machine, 46, first=1))
        announced(machine, first, 5)
        announced(machine, second, 5)
        machine.ended(first)
        assert list(ask(machine, 47, first=5).awaited) == [second]


class TestRanksThatComeAndGo:
    def test_all_owners_are_told_once_an_epoch_and_all_pods_asked_at_first(self) -> None:
        machine = home()
        assert machine.entry(0, 0) is Entry.COMES
        machine.entered(0, 0)
        assert [machine.entry(epoch, 0) for epoch in (0, 1)] == [Entry.KNOWN, Entry.MOVES_ON]
        machine.entered(1, 0)
        assert machine.entry(0, 0) is Entry.KNOWN
        machine.left(1, 0)
        assert machine.entry(1, 0) is Entry.COMES

    def test_what_a_rank_leaves_behind_counts_as_never_asked_for(self) -> None:
        machine = home()
        machine.entered(0, 0)
        machine.ended(the_request(machine, ask(machine, 45)), [sent(1), sent(2)])
        ask(machine, 46, first=1)
        assert machine.unused_ahead(0) == {0: 1}
        machine.entered(1, 0)
        assert machine.unused_ahead(0) == {0: 1}
        assert machine.remote_memory.used == 0
        machine.books_closed(0)
        assert machine.unused_ahead(0) == {}

    def test_what_a_rank_that_asks_elsewhere_was_sent_is_at_its_new_home(self) -> None:
        machine = home()
        machine.ended(the_request(machine, ask(machine, 45)), [sent(1)])
        machine.left(0, 0)
        assert (machine.unused_ahead(0), machine.remote_memory.used) == ({}, 0)

    def test_what_a_rank_leaves_behind_that_enters_the_next_epoch_elsewhere_was_never_asked_for(self) -> None:
        """Its owners count it as delivered, and send nothing of an epoch that the rank has left to the other home."""
        machine = home()
        machine.entered(0, 0)
        machine.ended(the_request(machine, ask(machine, 45)), [sent(1), sent(2)])
        ask(machine, 46, first=1)
        on_its_way = the_request(machine, ask(machine, 47, first=5))
        machine.left(1, 0)
        assert machine.unused_ahead(0) == {0: 1}
        machine.left(1, 0)
        machine.ended(on_its_way, [sent(6)])
        assert machine.unused_ahead(0) == {0: 2}, "it came when the rank had left"
        machine.left(2, 0)
        assert (machine.unused_ahead(0), machine.remote_memory.used) == ({0: 2}, 0)
        machine.books_closed(0)
        assert machine.unused_ahead(0) == {}

    def test_nothing_is_kept_of_what_comes_after_a_rank_has_left(self) -> None:
        """Nor when it has a batch here that ends after it left, or comes back: else the receipt counts it as missing,
        while the rank got it by way of the other home."""
        machine = home()
        batch = ask(machine, 45, 85)
        first, second = machine.ask(batch, 1, batch.of_owners[1], 2), machine.ask(batch, 2, batch.of_owners[2], 1)
        announced(machine, first, 7)
        late = ask(machine, 47, first=7)
        machine.left(0, 0)
        machine.ended(second, [sent(5)])
        machine.ended(first, [sent(7)])
        ((pod, places),) = machine.arrived(late).items()
        third = machine.ask(late, pod, places)
        ask(machine, 46, first=9)
        assert machine.ended(third, [sent(8)]) == (0, 1)
        assert machine.unused_ahead(0) == {}

    def test_a_part_that_was_left_out_is_found_in_the_next_epoch(self) -> None:
        machine = home()
        machine.entered(0, 0)
        for batch in range(0, 1200, 2):
            machine.over(ask(machine, 45, first=batch))
        assert machine.skipped(0, before_epoch=1) == (0, 1, 2)
        assert machine.skipped(0, before_epoch=0) is None
        machine.entered(1, 0)
        assert machine.skipped(0, before_epoch=1) is None, "it has been told, or may"

    def test_batches_that_are_being_answered_are_known(self) -> None:
        machine = home()
        batches = [ask(machine, 45, 46, first=first) for first in (0, 2)]
        assert machine.positions_under_way(0, 0) == 4
        machine.over(batches[0])
        assert machine.positions_under_way(0, 0) == 2


@dataclass(eq=False)
class UnderWay:
    """A batch that is being assembled, by one of a rank's workers."""

    batch: Batch[bytes]
    unasked: dict[int, np.ndarray]
    waits: bool
    open: int = 0
    """Answers that have not come."""


@dataclass(eq=False)
class Asked:
    worker: UnderWay
    request: OwnerRequest
    places: np.ndarray
    answered: bool = False


@draws(200, stateful_step_count=60)
class Home(RuleBasedStateMachine):
    """A home between ranks and owners that do everything that they can do."""

    LENGTH = 60

    @initialize(capacity=st.integers(0, 120), num_ranks=st.integers(1, 3), seed=st.integers(0, 99))
    def begin(self, capacity: int, num_ranks: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.machine = home(capacity)
        self.num_ranks = num_ranks
        self.traces = [rng.permutation(OF_EACH * NUM_PODS)[: self.LENGTH] for _ in range(num_ranks)]
        self.epochs = [0] * num_ranks
        self.workers: list[UnderWay] = []
        self.requests: list[Asked] = []
        self.given: dict[tuple[int, int, int], int] = {}
        """What owners have assigned to each request."""
        self.kept: Counter[tuple[int, int]] = Counter()
        for rank in range(num_ranks):
            self.machine.entered(0, rank)

    def sample_for(self, epoch: int, rank: int, position: int) -> int:
        return self.given.setdefault((epoch, rank, position), 10_000 + len(self.given))

    @rule(
        rank=st.integers(0, 2),
        positions=st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=8, unique=True),
        epochs_back=st.integers(0, 1),
        repeated=st.booleans(),
    )
    def a_worker_asks(self, rank: int, positions: list[int], epochs_back: int, repeated: bool) -> None:
        """For new positions, or again; in any order; while others of the rank ask."""
        rank %= self.num_ranks
        epoch = max(0, self.epochs[rank] - epochs_back)
        asked, repeats = self.traces[rank][positions], np.zeros(len(positions), dtype=bool)
        repeats[0] = repeated and positions[0] == self.LENGTH - 1
        batch = self.machine.begin(epoch, rank, np.array(positions), asked, repeats)
        batch.put(batch.repeats, asked[batch.repeats], [b"repeat"] * len(batch.repeats))
        self.put(batch, batch.own)
        self.workers.append(UnderWay(batch, dict(batch.of_owners), bool(batch.awaited)))

    def put(self, batch: Batch[bytes], places: np.ndarray) -> None:
        samples = [self.sample_for(batch.epoch, batch.rank, p) for p in batch.positions[places].tolist()]
        batch.put(places, np.array(samples, dtype=np.int64), [b"%d" % sample for sample in samples])

    @precondition(lambda self: any(worker.unasked for worker in getattr(self, "workers", ())))
    @rule(data=st.data())
    def an_owner_is_asked(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([worker for worker in self.workers if worker.unasked]))
        owners_left = len(worker.unasked)
        pod, places = worker.unasked.popitem()
        worker.open += 1
        self.requests.append(Asked(worker, self.machine.ask(worker.batch, pod, places, owners_left), places))

    @precondition(lambda self: any(not asked.answered for asked in getattr(self, "requests", ())))
    @rule(data=st.data(), ahead=st.lists(st.integers(0, OF_EACH // 2 - 1), max_size=6))
    def an_owner_answers(self, data: st.DataObject, ahead: list[int]) -> None:
        """It announces any of the positions that are its own, also those that were asked for long ago."""
        asked = data.draw(st.sampled_from([asked for asked in self.requests if not asked.answered]))
        its_own = np.flatnonzero(self.traces[asked.request.wire.rank] // OF_EACH == asked.request.pod)
        self.machine.announced(asked.request, its_own[[place for place in ahead if place < len(its_own)]])
        self.put(asked.worker.batch, asked.places)
        asked.answered = True
        asked.worker.open -= 1

    @precondition(lambda self: getattr(self, "requests", ()))
    @rule(data=st.data(), size=st.integers(0, 40), lost=st.booleans())
    def an_answer_ends(self, data: st.DataObject, size: int, lost: bool) -> None:
        """With all that was announced, however much room there was; or without. One that was lost is made again."""
        asked = data.draw(st.sampled_from(self.requests))
        self.requests.remove(asked)
        wire = asked.request.wire
        sent = []
        if asked.answered and not lost:
            for position in asked.request.announced:
                sample = self.sample_for(wire.epoch, wire.rank, position)
                sent.append(SentAhead(position, sample, size, b"%d" % sample))
        kept, refused = self.machine.ended(asked.request, sent)
        assert kept + refused == len(sent)
        assert kept * size <= wire.room_bytes, "kept more than was granted"
        self.kept[wire.epoch, wire.rank] += kept
        if not asked.answered:
            asked.worker.open -= 1
            asked.worker.unasked[asked.request.pod] = asked.places

    @precondition(lambda self: any(self.may_end(worker) for worker in getattr(self, "workers", ())))
    @rule(data=st.data(), given_up=st.booleans())
    def a_batch_ends(self, data: st.DataObject, given_up: bool) -> None:
        worker = data.draw(st.sampled_from([worker for worker in self.workers if self.may_end(worker)]))
        if worker.waits:
            worker.waits = False
            worker.unasked = self.machine.arrived(worker.batch)
        elif not worker.unasked:
            self.workers.remove(worker)
            if not given_up:
                self.check(worker.batch)
                self.machine.complete(worker.batch, 0)
            self.machine.over(worker.batch)

    def may_end(self, worker: UnderWay) -> bool:
        waits_for = {asked.request for asked in self.requests} & set(worker.batch.awaited)
        return not worker.open and not worker.unasked and not (worker.waits and waits_for)

    def check(self, batch: Batch[bytes]) -> None:
        payloads = batch.payloads
        for place, position in enumerate(batch.positions.tolist()):
            if payloads[place] == b"repeat":
                assert batch.sample_ids[place] == batch.asked[place]
                continue
            given = self.given[batch.epoch, batch.rank, position]
            assert batch.sample_ids[place] == given, f"position {position} got the sample of another one"
            assert payloads[place] == b"%d" % given

    @precondition(lambda self: hasattr(self, "machine"))
    @rule(rank=st.integers(0, 2))
    def a_rank_moves_on(self, rank: int) -> None:
        rank %= self.num_ranks
        self.epochs[rank] += 1
        self.machine.entered(self.epochs[rank], rank)
        held = self.machine.remote_memory
        assert all(of_rank != rank or epoch >= self.epochs[rank] for epoch, of_rank, _ in held.entries), "left behind"

    @precondition(lambda self: hasattr(self, "machine"))
    @rule(rank=st.integers(0, 2))
    def a_rank_asks_elsewhere(self, rank: int) -> None:
        rank %= self.num_ranks
        self.machine.left(self.epochs[rank], rank)
        assert all(of_rank != rank for _, of_rank, _ in self.machine.remote_memory.entries)
        for epoch in range(self.epochs[rank] + 1):
            del self.kept[epoch, rank]

    @invariant()
    def memory_is_a_promise(self) -> None:
        if hasattr(self, "machine"):
            memory = self.machine.remote_memory
            assert memory.used == sum(size for size, _ in memory.entries.values()) >= 0
            assert memory.granted == sum(asked.request.wire.room_bytes for asked in self.requests)
            assert memory.used + memory.granted <= memory.capacity
            under_way = sum(self.machine.positions_under_way(epoch, rank) for epoch in (0,) for rank in range(3))
            assert under_way >= 0

    @invariant()
    def what_is_unused_was_kept(self) -> None:
        for rank, epoch in enumerate(getattr(self, "epochs", ())):
            unused = self.machine.unused_ahead(epoch).get(rank, 0)
            assert unused <= self.kept[epoch, rank], "unused, and never came"

    def teardown(self) -> None:
        """All answers end, and all that ranks ask for then is answered once more."""
        if not hasattr(self, "machine"):
            return
        for asked in self.requests:
            self.machine.ended(asked.request)
        assert self.machine.remote_memory.granted == 0
        for rank in range(self.num_ranks):
            positions = np.arange(self.LENGTH)
            batch = self.machine.begin(
                self.epochs[rank], rank, positions, self.traces[rank], np.zeros(len(positions), dtype=bool)
            )
            assert not batch.awaited, "waits for an answer that has ended"
            self.put(batch, batch.own)
            for pod, places in batch.of_owners.items():
                self.machine.ended(self.machine.ask(batch, pod, places))
                self.put(batch, places)
            self.check(batch)
            self.machine.complete(batch, 0)
            self.machine.over(batch)
            assert self.machine.unused_ahead(self.epochs[rank]).get(rank, 0) == 0
        assert self.machine.remote_memory.granted == 0


test_schedules = Home.TestCase
