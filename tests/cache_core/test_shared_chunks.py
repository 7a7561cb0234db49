"""Jobs of one read order: each gets its own order, whoever reads; what is kept for others is bounded; and near each
other they read the store about once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.protocol.keyed_hash import key_of
from refill_service.cache_core.fair_queue import Need
from refill_service.cache_core.planned.placed_order import ChunkRead
from refill_service.cache_core.planned.share_memory import ShareMemory
from refill_service.cache_core.planned.share_order import order_share
from refill_service.cache_core.planned.shared_chunks import SharedChunks
from refill_service.cache_core.sample_mapping import Int64Array

LIMIT_PART = 0.13
"""Of what orders are planned for, about what pods let jobs keep for others."""
BATCH = 20


@dataclass
class Store:
    """One share of a dataset."""

    sizes: list[int]
    """Samples of each chunk."""
    lengths: Int64Array
    bytes_read: int = 0

    def __post_init__(self) -> None:
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    @property
    def num_samples(self) -> int:
        return int(self.starts[-1])

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())


def even(num_samples: int, chunk_size: int, num_bytes: int = 4000) -> Store:
    return Store([chunk_size] * (num_samples // chunk_size), np.full(num_samples, num_bytes, dtype=np.int64))


@dataclass(eq=False)
class Swept:
    """A job of a sweep, as a pod has it; what it reads is here at once. A sample's number stands for its bytes."""

    store: Store
    others: SharedChunks[int]
    seed: int
    planned_bytes: int
    limit_bytes: int
    num_epochs: int = 2
    place: int = 0
    """It has asked for all before, counted over all epochs."""
    came: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = ShareMemory(self.store.starts, self.store.lengths, self.planned_bytes)
        self.memory.memory_is(self.planned_bytes + self.planned_bytes // 4)
        self.others.joined(self.memory)
        self.others.may_keep(self.memory, self.limit_bytes)
        self._here: dict[int, dict[int, int]] = {}
        """By epoch, what is in memory."""

    @property
    def kept_bytes(self) -> int:
        return self.others.kept_bytes(self.memory)

    @property
    def num_places(self) -> int:
        return self.num_epochs * self.store.num_samples

    def apart(self, part: float) -> int:
        """In places, a part of what its memory is planned for."""
        return int(part * self.memory.planned_places) // BATCH * BATCH

    def order(self, epoch: int) -> list[int]:
        store, key, read_key = self.store, key_of("made up", self.seed, epoch), key_of("chunks", epoch)
        found = order_share(
            store.starts, store.lengths, self.planned_bytes, key, ramped=epoch == 0, read_key=read_key
        ).samples.tolist()
        assert isinstance(found, list)
        return found

    @property
    def orders(self) -> list[int]:
        return [sample for epoch in range(self.num_epochs) for sample in self.order(epoch)]

    def asks(self, count: int = BATCH) -> None:
        """For the next samples, as far as there are any."""
        memory, num_samples = self.memory, self.store.num_samples
        if self.place >= self.num_places:
            return
        epoch, first = divmod(self.place, num_samples)
        for each in range(epoch, min(epoch + 2, self.num_epochs)):
            if not memory.knows(each):
                memory.planned(each, memory.placed(np.array(self.order(each), dtype=np.int64)))
        places = np.arange(first, min(first + count, num_samples))
        self.place += len(places)
        asked = memory.asked(epoch, places)
        wanted, here = asked.samples.tolist(), self._here.setdefault(epoch, {})
        left = {sample: here.pop(sample) for sample in wanted if sample in here}
        self._gone(epoch, asked.samples)
        for of_epoch, samples in asked.dropped:
            for sample in samples.tolist():
                self._here[of_epoch].pop(sample, None)
            self._gone(of_epoch, samples)
        self._read(asked.reads, left)
        while (reads := memory.read_ahead()) is not None:
            self._read(reads, left)
        self.came += [left[sample] for sample in wanted]

    def _gone(self, epoch: int, samples: Int64Array) -> None:
        chunks = self.memory.chunks_of(samples).tolist()
        self.others.gone(self.memory, epoch, zip(chunks, self.store.lengths[samples].tolist(), strict=True))

    def _read(self, reads: list[ChunkRead], left: dict[int, int]) -> None:
        for read in reads:
            places = self.memory.places_in(read.chunk, read.samples)
            found = self.others.find(self.memory, read.epoch, read.chunk, places)
            if found is not None:
                self._arrives(read, found, left)
                self.others.has(self.memory, read.epoch, read.chunk)
                continue
            under_way = self.others.begins(self.memory, read.epoch, read.chunk, places, Need(read.due))
            self.store.bytes_read += int(self.store.lengths[read.samples[0] : read.samples[-1] + 1].sum())
            self._arrives(read, read.samples.tolist(), left)
            gone = read.samples[~self.memory.are_here(read.epoch, read.samples)]
            self.others.came(under_way, read.samples.tolist(), self.store.lengths[gone].tolist())
            self.others.ended(under_way)

    def _arrives(self, read: ChunkRead, pieces: list[int], left: dict[int, int]) -> None:
        stay = self.memory.arrived(read)
        for sample, piece, stays in zip(read.samples.tolist(), pieces, stay.tolist(), strict=True):
            (self._here.setdefault(read.epoch, {}) if stays else left)[sample] = piece


def swept(store: Store, count: int, planned_bytes: int, limit_bytes: int | None = None) -> list[Swept]:
    limit_bytes = int(LIMIT_PART * planned_bytes) if limit_bytes is None else limit_bytes
    others: SharedChunks[int] = SharedChunks()
    return [Swept(store, others, seed, planned_bytes, limit_bytes) for seed in range(count)]


def in_step(jobs: list[Swept], behind: int) -> Iterator[None]:
    """Each job so many places behind the one before it."""
    for step in range(0, jobs[0].num_places + behind * (len(jobs) - 1), BATCH):
        for number, job in enumerate(jobs):
            if step >= number * behind:
                job.asks()
        yield


@pytest.mark.variants("4-0.1-8", "2-0.4-32", "2-0.0-8")
@pytest.mark.parametrize("chunk_size", [8, 32])
@pytest.mark.parametrize(("count", "behind"), [(2, 0.0), (2, 0.4), (4, 0.1)])
def test_jobs_that_are_near_each_other_read_the_store_about_once(chunk_size: int, count: int, behind: float) -> None:
    """Each one so far behind the one before it, in parts of what memory holds."""
    store = even(8000, chunk_size)
    jobs = swept(store, count, store.num_bytes // 10)
    for _ in in_step(jobs, jobs[0].apart(behind)):
        assert all(job.kept_bytes <= job.limit_bytes for job in jobs)
    assert store.bytes_read <= 1.1 * 2 * store.num_bytes
    for job in jobs:
        assert job.came == job.orders


def test_a_job_that_is_far_behind_is_let_go_until_it_is_near_again() -> None:
    store = even(8000, 32)
    ahead, lags = jobs = swept(store, 2, store.num_bytes // 10)
    lags.asks()
    while ahead.place < 4000:
        ahead.asks()
    assert ahead.kept_bytes == 0, "what nobody near wants is kept"
    while lags.place < 4000:
        lags.asks()
    before = store.bytes_read
    while lags.place < 12_000:
        for job in jobs:
            job.asks()
    assert store.bytes_read - before <= 1.1 * store.num_bytes
    for job in jobs:
        assert job.came == job.orders[: job.place]


def test_with_less_room_others_find_a_part() -> None:
    """Not nothing, as if what is wanted next gave way first."""
    store = even(8000, 32)
    jobs = swept(store, 2, store.num_bytes // 10, store.num_bytes // 800)
    for _ in in_step(jobs, jobs[0].apart(0.4)):
        pass
    assert 1.1 * 2 * store.num_bytes <= store.bytes_read <= 1.8 * 2 * store.num_bytes


def test_a_job_that_begins_a_little_later_finds_what_was_read_before() -> None:
    store = even(8000, 32)
    (first,) = swept(store, 1, store.num_bytes // 10)
    while first.place < first.apart(0.05):
        first.asks()
    second, before = Swept(store, first.others, 1, first.planned_bytes, first.limit_bytes), store.bytes_read
    second.asks()
    assert store.bytes_read == before
    while second.place < 8000:
        first.asks()
        second.asks()
    assert store.bytes_read <= 1.2 * store.num_bytes  # and a part of the next epoch
    assert second.came == second.order(0)


def test_what_the_reader_has_in_memory_as_a_whole_gives_way_last() -> None:
    """Forgetting it would free nearly nothing."""
    store = even(8000, 8)
    (first,) = swept(store, 1, store.num_bytes // 4, store.num_bytes // 50)
    for _ in range(8):
        first.asks()
    assert first.place >= 8000 // 50, "more has left than may be kept"
    second, before = Swept(store, first.others, 1, first.planned_bytes, first.limit_bytes), store.bytes_read
    second.asks()
    partly_gone = {sample // 8 for sample in first.came}
    assert store.bytes_read - before <= len(partly_gone) * 8 * 4000


@given(st.data())
def test_whatever_jobs_do_each_has_its_order_and_what_is_kept_stays_within_bounds(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=30))
    store = Store(sizes, np.random.default_rng(data.draw(st.integers(0, 99))).integers(1, 100, sum(sizes)))
    planned_bytes, limit_bytes = (data.draw(st.integers(0, store.num_bytes // part)) for part in (1, 4))
    jobs = swept(store, data.draw(st.integers(2, 4)), planned_bytes, limit_bytes)
    there = list(jobs)
    for _ in range(data.draw(st.integers(1, 60))):
        job = data.draw(st.sampled_from(there))
        job.asks(data.draw(st.integers(1, BATCH)))
        if len(there) > 1 and data.draw(st.integers(0, 19)) == 0:
            job.others.left(job.memory)
            there.remove(job)
        assert all(0 <= each.kept_bytes <= limit_bytes for each in jobs)
    for job in jobs:
        assert job.came == job.orders[: job.place]
        job.others.left(job.memory)
        assert job.kept_bytes == 0


def test_who_is_waited_for_waits_for_no_read_ahead_of_need() -> None:
    store = even(64, 8)
    one, other = swept(store, 2, store.num_bytes)
    others = one.others
    ahead = others.begins(one.memory, 0, 3, [0, 1, 2, 3], Need())
    assert others.coming(other.memory, 0, 3, [1, 2], Need(0)) is None
    assert others.coming(other.memory, 0, 3, [1, 2], Need()) is ahead
    assert others.coming(other.memory, 0, 3, [3, 4], Need()) is None
    assert others.coming(one.memory, 0, 3, [1, 2], Need()) is None
    told = list[list[int]]()
    ahead.when_ended.append(lambda: told.append(sorted(ahead.pieces)))
    others.came(ahead, [10, None, 12, 13], [])
    others.ended(ahead)
    assert told == [[0, 2, 3]], "what is damaged does not come from another job"
    assert others.coming(other.memory, 0, 3, [1, 2], Need()) is None
