"""One owner over several epochs: opened, loaded ahead, abandoned. Never two samples for one request, never one sample
for two in an epoch.

A schedule follows from its seed. ``CORE_SCHEDULES=10000`` tries so many in place of some tens; a failure names
the seed that repeats it.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import numpy as np
import pytest
from tests.draws import times

from refill.protocol.policies import terms_of
from refill_service.cache_core.epoch_order import KeyedTraces
from refill_service.cache_core.owner_machine import (
    Abandon,
    CarryOut,
    CloseBooks,
    EpochState,
    Open,
    OpenEpoch,
    Order,
    OwnerMachine,
    Wake,
)
from refill_service.cache_core.policies.interface import Carried, EpochBegan, Policy, Read
from refill_service.cache_core.policies.registry import new_policy
from refill_service.cache_core.rank_places import RankPlaces
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout, abstract_chunks_for_budget

SCHEDULES = int(os.environ.get("CORE_SCHEDULES", times(150)))
NUM_EPOCHS = 4


class Job:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        blobs = [self.random.randint(1, 20) for _ in range(self.random.randint(1, 3))]
        self.num_ranks = self.random.randint(1, 3)
        self.policy = self.random.choice(["exact", "redox"])
        self.layout = ChunkLayout(np.concatenate([[0], np.cumsum(blobs)]), self.random.randint(1, min(8, max(blobs))))
        self.lengths = np.random.default_rng(seed).integers(1, 100, self.layout.num_samples)
        self.memory_bytes = self.random.randint(500, 5000)
        self.share = self.layout.share(0, 1)
        num_abstract_chunks = abstract_chunks_for_budget(
            self.share.num_chunks, float(self.lengths.mean()) * self.layout.chunk_size, self.memory_bytes
        )
        self.mapping = AbstractMapping(self.share, max(1, num_abstract_chunks))
        self.seed = seed
        self.traces = [
            KeyedTraces(self.layout.num_samples, self.num_ranks, seed=seed, epoch=e) for e in range(NUM_EPOCHS)
        ]
        self.given: list[dict[int, int]] = [{} for _ in range(NUM_EPOCHS)]
        """By epoch, asked -> sample: all that has left."""
        self.rank_epochs = [-1] * self.num_ranks
        self.machine = OwnerMachine(self, RankPlaces(self.num_ranks), 0, self.memory_bytes, self.new_policy)
        self.open: dict[OpenEpoch, list[Read]] = {}
        """Reads under way, by epoch."""

    def has_epoch(self, epoch: int) -> bool:
        return epoch < NUM_EPOCHS

    def known_traces(self, epoch: int) -> KeyedTraces:
        return self.traces[epoch]

    def new_policy(self, epoch: int, traces: KeyedTraces, carried: Carried) -> Policy:
        return new_policy(
            self.policy,
            EpochBegan(
                self.mapping,
                traces,
                self.lengths,
                prefetch_window=20,
                key=f"{self.seed} {epoch}",
                settings=terms_of(self.policy).settings_with(self.policy, {}),
                carried=carried,
            ),
        )

    def carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case Open(epoch):
                    self.open[epoch] = []
                case CarryOut(epoch, wanted):
                    self.open[epoch] += wanted.reads
                case Abandon(epoch):
                    assert all(at > epoch.number for at in self.rank_epochs), "a rank is still in it"
                case CloseBooks(epoch):
                    assert epoch not in self.machine.epochs
                case Wake():
                    pass
        self.check()

    def check(self) -> None:
        numbers = [epoch.number for epoch in self.machine.epochs]
        assert numbers == sorted(set(numbers)), "epochs are not in their order"
        assert len(numbers) <= 3, "more epochs are kept than can be asked for"

    def ask(self, rank: int, number: int, positions: np.ndarray) -> bool:
        """Whether it was answered."""
        self.rank_epochs[rank] = max(number, self.rank_epochs[rank])
        self.carry_out(self.machine.rank_entered(number, rank))
        state = self.machine.state_of(number)
        if state is EpochState.MAY_OPEN:
            self.carry_out(self.machine.traces_known(number, self.traces[number]))
        elif state is not EpochState.OPEN:
            return False
        epoch = self.machine.known(number)
        assert epoch is not None
        asked, repeats = self.traces[number].asked(rank, positions)
        asked = asked[~repeats]
        if not len(asked):
            return True
        answers, orders = self.machine.requested(epoch, rank, asked)
        if answers is None:
            return False
        self.carry_out(orders)
        self.leaves(number, asked, answers.samples)
        end = int(positions.max()) + 1
        _, ahead, orders = self.machine.answer_left(number, rank, asked, end, self.random.randrange(300), 0)
        self.carry_out(orders)
        self.leaves(number, self.traces[number].asked(rank, ahead.positions)[0], ahead.samples)
        return True

    def leaves(self, number: int, asked: np.ndarray, samples: np.ndarray) -> None:
        given = self.given[number]
        for request, sample in zip(asked.tolist(), samples.tolist(), strict=True):
            known = given.setdefault(request, sample)
            assert known == sample, f"epoch {number}: the request for {request} got {known}, asked again {sample}"
        twice = [sample for sample, count in Counter(given.values()).items() if count > 1]
        assert not twice, f"epoch {number}: samples {twice} were given twice"

    def a_read_ends(self) -> None:
        reading = [(epoch, read) for epoch, reads in self.open.items() for read in reads]
        if not reading:
            return
        epoch, read = self.random.choice(reading)
        self.open[epoch].remove(read)
        how = self.random.random()
        if how < 0.2:
            self.carry_out(self.machine.failed(epoch, read))
        else:
            damaged = read.samples[:1] if how < 0.3 else read.samples[:0]
            self.carry_out(self.machine.arrived(epoch, read, damaged))

    def a_step(self) -> None:
        what = self.random.random()
        rank = self.random.randrange(self.num_ranks)
        if what < 0.45:
            number = max(0, self.rank_epochs[rank])
            length = self.traces[number].length(rank)
            start = self.random.randrange(length)
            self.ask(rank, number, np.arange(start, min(length, start + self.random.randint(1, 8))))
        elif what < 0.5:  # it leaves its epoch early, or asks for the one before once more
            number = min(NUM_EPOCHS - 1, self.rank_epochs[rank] + self.random.choice([1, -1]))
            self.ask(rank, max(0, number), np.array([0]))
        elif what < 0.56:
            self.whole_epoch(max(0, self.rank_epochs[rank]))
        elif what < 0.62:
            if self.machine.may_go_on:
                self.carry_out(self.machine.go_on())
        else:
            self.a_read_ends()

    def whole_epoch(self, number: int) -> None:
        """Every rank that is not past it asks for all of an epoch."""
        for rank in range(self.num_ranks):
            if self.rank_epochs[rank] <= number:
                self.ask(rank, number, np.arange(self.traces[number].length(rank)))

    def ends(self) -> None:
        """The last epoch is asked for to its end."""
        last = NUM_EPOCHS - 1
        for number in range(max(0, min(self.rank_epochs)), NUM_EPOCHS):
            self.whole_epoch(number)
        for rank in range(self.num_ranks):
            assert self.ask(rank, last, np.arange(self.traces[last].length(rank))), "the last epoch never opened"
        assert sorted(self.given[last].values()) == list(range(self.layout.num_samples)), "samples are missing"


@pytest.mark.timeout(180 if SCHEDULES < 1000 else 7200)
@pytest.mark.parametrize("part", range(3))
def test_schedules(part: int) -> None:
    for seed in range(part, SCHEDULES, 3):
        try:
            job = Job(seed)
            for _ in range(job.random.randint(5, 80)):
                job.a_step()
            job.ends()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_an_epoch_is_abandoned_and_its_books_closed() -> None:
    """What the schedules should have come by, step by step."""
    job = next(job for seed in range(100) if (job := Job(seed)).num_ranks == 1)
    kinds: list[type] = []
    carry_out = job.carry_out

    def seen(orders: list[Order]) -> None:
        kinds.extend(map(type, orders))
        carry_out(orders)

    job.carry_out = seen  # type: ignore[method-assign]
    job.whole_epoch(0)
    job.ask(0, 1, np.array([0]))
    job.ask(0, 2, np.array([0]))
    assert Abandon in kinds, "epoch 1 was left with samples that nobody asked for, and keeps its memory"
    assert not job.ask(0, 1, np.array([1])) or job.machine.known(1) is not None
    job.ask(0, 3, np.array([0]))
    assert CloseBooks in kinds
    assert job.machine.state_of(0) is EpochState.ENDED


@pytest.mark.parametrize("last", ["arrives", "fails"])
def test_the_next_epoch_opens_when_the_last_chunk_comes_after_the_last_request(last: str) -> None:
    """Or the memory that the epoch leaves would stand empty until the next is asked for."""
    job = next(job for seed in range(100) if (job := Job(seed)).num_ranks == 1 and job.policy == "exact")
    job.memory_bytes = int(job.lengths.sum())
    job.machine = OwnerMachine(job, RankPlaces(1), 0, job.memory_bytes, job.new_policy)
    job.whole_epoch(0)
    [reads] = job.open.values()
    assert reads, "nothing is on its way: the test does not show what it should"
    (epoch,) = job.machine.epochs
    while reads:
        assert job.machine.known(1) is None
        read = reads.pop(0)
        failed = last == "fails" and not reads
        job.carry_out(job.machine.failed(epoch, read) if failed else job.machine.arrived(epoch, read))
    assert job.machine.known(1) is not None, "the next epoch waits until it is asked for"
