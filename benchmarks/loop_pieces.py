"""For how long does a job hold a pod's loop in one piece? Others wait so long at most.

    make bench-pieces

Samples have a byte each, so that nothing else costs. CPU time of the loop's thread, which a busy machine hardly makes
longer, without the garbage collector. First live jobs with extreme chunks: batches of one rank, with memory for some of
the samples, the longest piece from where the epoch is opened until all that was ordered has come. Then planned jobs of
very many samples: what a pod does for them, step by step. Some three minutes on two cores.
"""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from benchmarks.machine import machine

from refill.errors import JobLost
from refill.pods.unreported import in_reports
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import BatchRequest
from refill_service.cache_core.dataset_index import INDEX_KEY, RECORD, sample_checksum
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.index_writer import IndexWriter
from refill_service.jobs.job import Job
from refill_service.jobs.owner import Owner
from refill_service.jobs.waits import RankWaits
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.pinned_tier import PinnedTier
from refill_service.pod.cache_node import CacheNode
from refill_service.serving.metrics import text_of
from refill_service.serving.planned_routes import Received
from refill_service.settings import load_settings

Result = TypeVar("Result")


class Shape(NamedTuple):
    policy: str
    """With its eviction."""
    chunk_size: int
    num_samples: int
    batch: int
    ranks: int = 1

    @property
    def settings(self) -> dict[str, Any]:
        policy, _, eviction = self.policy.partition(" ")
        return {"policy": policy} | ({"policy_settings": {"eviction": eviction}} if eviction else {})


SHAPES = (
    *(Shape(kept, size, 400_000, 32) for kept in ("exact rolling", "exact earliest") for size in (64, 4_096, 65_536)),
    Shape("redox", 65_536, 400_000, 32),
    Shape("redox", 1, 1_000_000, 32),
    *(Shape("exact rolling", 1, batch, batch) for batch in (4_096, 60_000)),
    Shape("exact rolling", 64, 400_000, 32, ranks=4_096),
    *(Shape(policy, 64, 10_000_000, 32) for policy in ("redox", "exact rolling")),
)
MEMORY = 0.4
"""Of the samples."""
PLANNED_SAMPLES = 10_000_000
SPANS = 1 << 17
"""In a report, as many as there may be."""


class TimedLoop(asyncio.SelectorEventLoop):
    longest_seconds = 0.0

    def _timed(self, callback: Callable[..., object]) -> Callable[..., object]:
        def timed(*given: Any) -> object:
            before = time.thread_time()
            try:
                return callback(*given)
            finally:
                self.longest_seconds = max(self.longest_seconds, time.thread_time() - before)

        return timed

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *given: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._timed(callback), *given, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *given: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon_threadsafe(self._timed(callback), *given, context=context)


def main() -> None:
    print(f"{machine()}; memory for {MEMORY:.0%} of the samples")
    print("policy                chunk     samples     batch  ranks  longest piece")
    with tempfile.TemporaryDirectory(prefix="refill-bench-") as folder:  # what is used for the first time takes longer
        _longest_seconds(_written(Path(folder), 1_000), SHAPES[0]._replace(num_samples=1_000))
    for shape in SHAPES:
        with tempfile.TemporaryDirectory(prefix="refill-bench-") as folder:
            seconds = _longest_seconds(_written(Path(folder), shape.num_samples), shape)
        numbers = f"{shape.chunk_size:8,} {shape.num_samples:11,} {shape.batch:9,} {shape.ranks:6,}"
        print(f"{shape.policy:18} {numbers} {1000 * seconds:11.1f} ms", flush=True)
    print(f"\nof planned jobs of {PLANNED_SAMPLES:,} samples  longest piece")
    with tempfile.TemporaryDirectory(prefix="refill-bench-") as folder:
        dataset = _written(Path(folder), PLANNED_SAMPLES)
        for what, seconds in _timed(lambda loop: _steps(loop, dataset)):
            print(f"{what:41} {1000 * seconds:9.1f} ms", flush=True)


def _longest_seconds(dataset: str, shape: Shape) -> float:
    return _timed(lambda loop: _two_batches(loop, dataset, shape))


def _timed(work: Callable[[TimedLoop], Coroutine[Any, Any, Result]]) -> Result:
    loop = TimedLoop()
    gc.disable()
    try:
        return loop.run_until_complete(work(loop))
    finally:
        gc.enable()
        loop.close()


async def _steps(loop: TimedLoop, url: str) -> list[tuple[str, float]]:
    """What each took in one piece, at most."""
    node, found = CacheNode(load_settings(memory_bytes="8GiB", dataset_urls=url)), list[tuple[str, float]]()
    jobs, team = node.planned, ""

    async def step(what: str, work: Coroutine[Any, Any, Any]) -> Any:
        await asyncio.sleep(0)
        loop.longest_seconds = 0.0
        result = await asyncio.create_task(work)
        await asyncio.sleep(0)
        found.append((what, loop.longest_seconds))
        return result

    async def register(name: str, chunk_size: int) -> None:
        spec = JobSpec(name, url, policy="planned", chunk_size=chunk_size)
        await jobs.register(spec, None, begun=False, again=False)

    async def batch(epoch: int, first: int) -> None:
        wanted = BatchRequest(epoch, 0, np.arange(first, first + 32))
        await jobs.jobs["other"].take(wanted, says_damage=False)

    async def report() -> None:
        """As many pieces as a client makes of it."""
        pairs = np.random.default_rng(1).permutation(SPANS)[:, None] * 2 + np.arange(2)
        about = {"epoch": 0, "rank": 0, "num_ranks": 1}
        bodies = await asyncio.to_thread(
            lambda: [json.dumps(about | {"spans": some}).encode() for some in in_reports(pairs.tolist())]
        )
        loop.longest_seconds = 0.0
        received, dealing = jobs.jobs["other"].received, jobs.jobs["other"].dealing(1, 1, 0, drop_last=False)
        for body in bodies:
            await asyncio.sleep(0)
            read = Received.model_validate(json.loads(body))
            received.received(0, dealing, 0, read.spans, now=1.0)

    await step("it is registered", register("first", 64))
    await step("another one on the dataset is registered", register("other", 100))
    await step("a batch in the midst of an epoch", batch(0, PLANNED_SAMPLES // 2))
    await step(f"a report of {SPANS:,} spans", report())
    await step("a receipt", jobs.receipts.receipt("other", 0, team, ""))
    await step("metrics", text_of(node))
    await step("it ends", jobs.end_here("other"))
    await node.close()
    return found


async def _two_batches(loop: TimedLoop, url: str, shape: Shape) -> float:
    spec = JobSpec("bench", url, chunk_size=shape.chunk_size, world_size=shape.ranks, **shape.settings)
    dataset = await Dataset.open(url)
    records = await dataset.load_records(0, dataset.num_samples)
    layout, memory_bytes = ChunkLayout(dataset.blobs.first_sample, spec.chunk_size), int(MEMORY * shape.num_samples)
    job = await asyncio.to_thread(
        lambda: Job(
            spec,
            dataset,
            records,
            layout,
            ordinal=0,
            num_pods=1,
            memory_bytes=2 * memory_bytes,
            abstract_bytes=memory_bytes,
            incarnation="",
        )
    )
    owner = Owner(job, ByteGate(1 << 20), PinnedTier(0).lease("", records), 10_000, 600, RankWaits(60))
    traces = await job.traces(0, owner.waits)
    batches = [traces.asked(0, np.arange(start, start + shape.batch))[0] for start in (0, shape.batch)]
    await asyncio.sleep(0)
    loop.longest_seconds = 0.0
    for asked in batches[: shape.num_samples // shape.ranks // shape.batch]:
        await owner.take(await owner.open(0, 0), 0, asked)
        await asyncio.sleep(0)
        while owner.reads:
            await asyncio.wait(owner.reads)
    longest_seconds = loop.longest_seconds
    await owner.close(JobLost("measured"))
    await dataset.close()
    return longest_seconds


def _written(folder: Path, num_samples: int) -> str:
    """A dataset in one blob. Returns its URL."""
    blob = "blob-000000.tar"
    (folder / blob).write_bytes(b"x" * num_samples)
    records = np.zeros(num_samples, dtype=RECORD)
    records["offset"], records["length"], records["checksum"] = np.arange(num_samples), 1, sample_checksum(b"x")
    with tempfile.TemporaryDirectory() as spool, IndexWriter(Path(spool)) as writer:
        writer.add_blob(blob, num_samples, [records])
        shutil.copy(writer.finish({}), folder / INDEX_KEY)
    return folder.as_uri()


if __name__ == "__main__":
    main()
