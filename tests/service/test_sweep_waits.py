"""Jobs with one ``read_seed`` never wait for each other in a circle: whatever order reads begin, fail and are cancelled
in, with a pinned tier in memory and on disk, every request ends, and with the right bytes.

All that serves a share at a pod is as it is, in one process. The store and the threads do what is drawn, when it is
drawn: no clock is asked.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws
from tests.pod_fixtures import write_files

from refill.errors import JobError, RefillError, StoreUnavailable
from refill.protocol.plan_settings import PlanSettings
from refill_service.cache_core.planned.job_orders import JobOrders
from refill_service.cache_core.planned.share_memory import ShareMemory
from refill_service.cache_core.planned.shared_chunks import SharedChunks
from refill_service.cache_core.policies.interface import EpochCounts
from refill_service.cache_core.record_pieces import Records
from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array
from refill_service.cache_core.shared_room import Asker
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.pack import pack
from refill_service.jobs.chunk_reader import ChunkReader
from refill_service.jobs.running_epoch import OwnerCounts
from refill_service.jobs.single_reads import SingleReads
from refill_service.memory.byte_gate import ByteGate, Passage
from refill_service.memory.payload import Payload, RecentlySent
from refill_service.memory.pinned_tier import PinnedShare, PinnedTier
from refill_service.object_store.second_requests import Room
from refill_service.planned.share_reads import HeldBack
from refill_service.planned.share_server import ShareServer
from refill_service.planned.shared_reads import SharedReads

NUM_SAMPLES, CHUNK, BATCH = 96, 4, 6
_MOST_ROUNDS = 20_000
"""Of the loop, in which all that was asked for has come, if nobody waits in a circle: some hundreds are enough."""


class Told:
    """What waits to be done until somebody says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[BaseException | None], None]] = []

    def go_on(self, number: int, error: BaseException | None = None) -> None:
        if self.waiting:
            self.waiting.pop(number % len(self.waiting))(error)


class Threads(ThreadPoolExecutor):
    """What threads are to do is done when it is told, at once."""

    def __init__(self, told: Told) -> None:
        super().__init__(1)
        self._told = told

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work(_: BaseException | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._told.waiting.append(work)
        return future


class ToldDataset(Dataset):
    """Its store answers, or fails, when it is told to."""

    told: Told
    blobs_here: dict[str, bytes]

    async def read_samples(self, records: Records, first: int, end: int, room: Room | None = None) -> memoryview:
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def answer(error: BaseException | None) -> None:
            if answered.done():
                return
            if error is None:
                answered.set_result(None)
            else:
                answered.set_exception(error)

        self.told.waiting.append(answer)
        await answered
        wanted = records.part(first, end)
        start, stop = int(wanted.offset[0]), int(wanted.offset[-1] + wanted.length[-1])
        return memoryview(self.blobs_here[self.blobs.names[self.blobs.blob_of(first)]])[start:stop]


class Packed(NamedTuple):
    url: str
    num_bytes: int
    """Of its samples."""
    blobs: dict[str, bytes]


@dataclass
class Reading:
    """A job at a pod, as far as single reads need it."""

    ordinal: int
    asker: Asker
    dataset: Dataset
    share: Any


@dataclass
class Job:
    server: ShareServer
    order: list[Int64Array]
    """The sample at each place, by epoch."""
    asked: int = 0
    """Places of all epochs."""
    requests: list[tuple[int, Int64Array, asyncio.Task[tuple[Int64Array, list[Payload]]]]] = field(default_factory=list)
    is_over: bool = False

    def asks(self) -> None:
        epoch, first = divmod(self.asked, NUM_SAMPLES)
        if self.is_over or epoch >= len(self.order):
            return
        self.asked += BATCH
        self._ask(epoch, np.arange(first, first + BATCH))

    def _ask(self, epoch: int, places: Int64Array) -> None:
        task = asyncio.create_task(self.server.take(epoch, places, says_damage=False))
        self.requests.append((epoch, places, task))

    def asks_again(self) -> None:
        """For all that failed, or was given up."""
        requests, self.requests = self.requests, []
        for epoch, places, task in requests:
            if task.cancelled() or task.exception() is not None:
                self._ask(epoch, places)
            else:
                self.requests.append((epoch, places, task))

    @property
    def are_done(self) -> bool:
        return all(task.done() for _, _, task in self.requests)


class Pod:
    """What jobs at one pod have in common, for one share."""

    def __init__(self, dataset: Dataset, records: Records, pinned: PinnedShare, gate_bytes: int) -> None:
        self.dataset, self.records, self.pinned = dataset, records, pinned
        self.layout = ChunkLayout(dataset.blobs.first_sample, CHUNK)
        self.gate = ByteGate(gate_bytes)
        self.others: SharedChunks[Payload] = SharedChunks()

    def job(
        self,
        seed: int,
        read_seed: int | None,
        memory_bytes: int,
        *,
        shares: bool,
        wait_seconds: float = 3600,
        held_back: HeldBack | None = None,
    ) -> Job:
        dataset, lengths = self.dataset, np.asarray(self.records.length)
        plan = PlanSettings("drawn", NUM_SAMPLES, CHUNK, 1, memory_bytes, 8, seed, read_seed=read_seed)
        orders = JobOrders(plan, self.layout, lengths.__getitem__)
        share, of_share = orders.share(0)
        memory = ShareMemory(share.starts, of_share, orders.planned_bytes(0))
        asker = Asker(job=f"job {seed}")
        chunks = ChunkReader(dataset, self.records, self.layout.share(0, 1), self.gate, self.pinned, asker)
        memory.most_at_first_bytes = chunks.limit_bytes
        counts: dict[int, OwnerCounts] = defaultdict(lambda: OwnerCounts(EpochCounts()))
        server = ShareServer(
            orders,
            0,
            share,
            of_share,
            memory,
            chunks,
            SingleReads(Reading(0, asker, dataset, self.layout.share(0, 1)), self.gate, 3600),
            RecentlySent(memory_bytes // 10),
            counts.__getitem__,
            name=asker.job,
            wait_seconds=wait_seconds,
            num_epochs=2,
            lists=None,
            planning=asyncio.Lock(),
            held_back=held_back or HeldBack(),
            shared=SharedReads(self.others, memory, of_share, chunks) if shares else None,
        )
        server.memory_is(memory_bytes + memory_bytes // 4, memory_bytes // 8)
        return Job(server, [share.samples[orders.order(epoch, 0, of_share)] for epoch in range(2)])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    files, store = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("store")
    content = write_files(files, NUM_SAMPLES, least=100, most=300)
    asyncio.run(pack(str(files), store.as_uri(), blob_bytes=8000))
    blobs = {path.relative_to(store).as_posix(): path.read_bytes() for path in store.rglob("*") if path.is_file()}
    return Packed(store.as_uri(), sum(map(len, content.values())), blobs)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "store", "store", "fails", "thread", "thread", "cancel", "close"]),
        st.integers(0, 30),
        st.sampled_from([0, 0, 1, 2, 3, 8, 30]),
    ),
    min_size=10,
    max_size=80,
)
"""``(what, which one, rounds of the loop after it)``"""


@draws(200)
@given(data=st.data())
def test_jobs_with_one_read_seed_never_wait_in_a_circle(small: Packed, data: st.DataObject) -> None:
    total = small.num_bytes
    count = data.draw(st.integers(2, 3), "jobs")
    alone = data.draw(st.booleans(), "one more, of the same order, that shares by the pinned tier alone")
    memory_bytes = total // data.draw(st.sampled_from([2, 4, 8]), "of it memory holds")
    gate_bytes = data.draw(st.sampled_from([2000, 10**6]), "gate")
    in_memory, on_disk = (data.draw(st.sampled_from([0, total // 3, total]), name) for name in ("memory", "disk"))
    steps = data.draw(STEPS, "steps")

    async def run(folder: Path) -> None:
        store, threads = Told(), Told()
        dataset = await ToldDataset.open(small.url)
        assert isinstance(dataset, ToldDataset)
        dataset.told, dataset.blobs_here = store, small.blobs
        records = await dataset.load_records(0, NUM_SAMPLES)
        asyncio.get_running_loop().set_default_executor(Threads(threads))
        tier = PinnedTier(in_memory, folder if on_disk else None, on_disk)
        pod = Pod(dataset, records, tier.lease(dataset.shared_as, records), gate_bytes)
        jobs = [pod.job(seed, 7, memory_bytes, shares=True) for seed in range(count)]
        jobs += [pod.job(7, None, memory_bytes, shares=False)] * alone
        closing: list[asyncio.Task[None]] = []
        for what, which, rounds in steps:
            job = jobs[which % len(jobs)]
            if what == "ask":
                job.asks()
            elif what == "store":
                store.go_on(which)
            elif what == "fails":
                store.go_on(which, StoreUnavailable("drawn"))
            elif what == "thread":
                threads.go_on(which)
            elif what == "cancel" and job.requests:
                job.requests[which % len(job.requests)][2].cancel()
            elif what == "close" and not job.is_over and sum(not each.is_over for each in jobs) > 1:
                job.is_over = True
                closing.append(asyncio.create_task(job.server.close(JobError("it was ended"))))
            for _ in range(rounds):
                await asyncio.sleep(0)
        # From here on nothing fails.
        await until_done(
            lambda: all(job.are_done for job in jobs) and all(map(asyncio.Task.done, closing)), store, threads
        )
        there = [job for job in jobs if not job.is_over]
        for job in there:
            job.asks_again()
            while job.asked < 2 * NUM_SAMPLES:
                job.asks()
        await until_done(lambda: all(job.are_done for job in there), store, threads)
        for job in jobs:
            await check(job, records, dataset)
            if not job.is_over:
                closing.append(asyncio.create_task(job.server.close(JobError("it is over"))))
        await until_done(lambda: all(map(asyncio.Task.done, closing)), store, threads)
        tier.close()
        await dataset.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


@pytest.mark.parametrize("others_get", [True, False])
def test_a_share_waits_as_long_as_the_store_brings_anything_to_its_job(small: Packed, others_get: bool) -> None:
    """A large batch has thousands of reads begun: by their order, a share may get nothing for a while."""

    async def run() -> None:
        store, threads = Told(), Told()
        dataset = await ToldDataset.open(small.url)
        assert isinstance(dataset, ToldDataset)
        dataset.told, dataset.blobs_here = store, small.blobs
        records = await dataset.load_records(0, NUM_SAMPLES)
        asyncio.get_running_loop().set_default_executor(Threads(threads))
        tier, held_back = PinnedTier(0), HeldBack()
        held_back.last_ended = time.monotonic() + 3600 * others_get
        pod = Pod(dataset, records, tier.lease(dataset.shared_as, records), 10**6)
        job = pod.job(1, None, small.num_bytes, shares=False, wait_seconds=0, held_back=held_back)
        job.asks()
        await until_done(lambda: job.are_done, store, threads)
        error = job.requests[0][2].exception()
        assert isinstance(error, StoreUnavailable) is not others_get, error
        closing = asyncio.create_task(job.server.close(JobError("it is over")))
        await until_done(closing.done, store, threads)
        await dataset.close()

    asyncio.run(run())


async def until_done(are_done: Callable[[], bool], store: Told, threads: Told) -> None:
    for _ in range(_MOST_ROUNDS):
        if are_done():
            return
        store.go_on(0)
        threads.go_on(0)
        await asyncio.sleep(0)
    raise AssertionError("somebody waits, though the store has answered all")


async def check(job: Job, records: Records, dataset: Dataset) -> None:
    """Each request has had its samples, with their bytes; of a job that was ended it may have failed."""
    for epoch, places, task in job.requests:
        if job.is_over:
            with suppress(RefillError, asyncio.CancelledError):
                await task
            continue
        ids, payloads = await task
        assert ids.tolist() == job.order[epoch][places].tolist()
        for sample, payload in zip(ids.tolist(), payloads, strict=True):
            dataset.verify_sample(bytes(payload), records.part(sample, sample + 1), sample)


class CountedGate(ByteGate):
    """Knows when so many reads have come to it."""

    def __init__(self, limit_bytes: int, num_reads: int) -> None:
        super().__init__(limit_bytes)
        self._num_to_come = num_reads
        self.all_have_come = asyncio.Event()

    @asynccontextmanager
    async def passage(self, *args: Any, **kwargs: Any) -> AsyncIterator[Passage]:
        self._num_to_come -= 1
        if self._num_to_come == 0:
            self.all_have_come.set()
        async with super().passage(*args, **kwargs) as inside:
            yield inside


@pytest.mark.parametrize("shares", [False, True], ids=["alone", "with others of its read_seed"])
def test_what_somebody_waits_for_is_read_next_though_all_that_memory_holds_was_begun_before(
    small: Packed, shares: bool
) -> None:
    async def run() -> None:
        store = Told()
        dataset = await ToldDataset.open(small.url)
        assert isinstance(dataset, ToldDataset)
        dataset.told, dataset.blobs_here = store, small.blobs
        records = await dataset.load_records(0, NUM_SAMPLES)
        pod = Pod(dataset, records, PinnedTier(0, None, 0).lease(dataset.shared_as, records), gate_bytes=2000)
        gate = pod.gate = CountedGate(2000, NUM_SAMPLES // CHUNK)
        job = pod.job(1, 7, 10 * small.num_bytes, shares=shares)
        job.asks()
        while not job.are_done:
            store.go_on(0)
            await asyncio.sleep(0)
        await gate.all_have_come.wait()
        inside = len(store.waiting)
        assert job.server.resident_bytes < small.num_bytes, "there is nothing left to read"
        ahead = np.arange(NUM_SAMPLES // 2, NUM_SAMPLES // 2 + BATCH)
        request = asyncio.create_task(job.server.take(0, ahead, says_damage=False))
        num_read = 0
        while not request.done():
            num_read += bool(store.waiting)
            store.go_on(0)
            await asyncio.sleep(0)
        # One more in the turn of the loop in which it is told.
        assert num_read <= inside + BATCH + 1, "reads that nobody waits for came before"
        await job.server.close(JobError("over"))
        await dataset.close()

    asyncio.run(run())
