"""How does a bucket of WebDataset tars become a dataset as it lies there? ``refill index``.

Shards are parsed in threads (tarfile is not asynchronous), which get their bytes from an event loop that the store
belongs to; in processes of their own where there is much to read. Each shard is read once; memory is two ranges for
each that is under way, and 24 bytes for each of its samples.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from refill.errors import DatasetExists, EmptyDataset, InvalidInput, SampleDamaged, StoreNotFound
from refill_service.cache_core.dataset_index import INDEX_KEY
from refill_service.cache_core.dataset_labels import LABELS_KEY
from refill_service.datasets.index_writer import IndexWriter, RecordArray
from refill_service.datasets.pack_claim import MARKER_KEY, marker_of
from refill_service.datasets.progress import Progress
from refill_service.datasets.shard_reader import RANGE_BYTES, ShardReport, read_shard
from refill_service.datasets.worker_processes import Stop, Worker, WorkerProcesses
from refill_service.num_cores import num_cores
from refill_service.object_store.base import ListedObject, ObjectStore, ObjectTooShort
from refill_service.object_store.open_store import open_store
from refill_service.object_store.store_settings import StoreSettings

__all__ = ["IndexSummary", "index_shards"]


@dataclass
class IndexSummary:
    num_samples: int = 0
    num_blobs: int = 0
    blob_bytes: int = 0
    num_passed_over: int = 0
    """Members of the tars that belong to no sample."""
    warnings: list[str] = field(default_factory=list)


_MOST_JOBS = 64
_MUCH_BYTES = 256_000_000
"""Less is read before other processes have begun."""
_FoundInShard = tuple[list[RecordArray], ShardReport]
_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")


async def index_shards(
    url: str,
    settings: StoreSettings | None = None,
    *,
    jobs: int | None = None,
    in_processes: bool | None = False,
    force: bool = False,
    quiet: bool = True,
) -> IndexSummary:
    """Write the index of all ``*.tar`` below ``url``, in the order of their names.

    Raises :class:`DatasetExists`, :class:`EmptyDataset`, :class:`SampleDamaged` with shard and byte where one can't
    be read, and errors of the store. Then nothing was written.

    :param jobs: tars that are read at once; None: two more than there are cores.
    :param in_processes: whether each is read by a process of its own; None: if there is much to read.
    """
    if jobs is not None and not 1 <= jobs <= _MOST_JOBS:
        raise InvalidInput(f"jobs must be 1 to {_MOST_JOBS}, got {jobs}")
    jobs = min(_MOST_JOBS, num_cores() + 2) if jobs is None else jobs
    store = open_store(url, settings)
    try:
        await _refuse_unless_free(store, force)
        shards, packed = [], 0
        async for found in store.list():
            if found.key.endswith(".tar"):
                shards.append(found)
            packed += found.key.endswith(_COMPRESSED)
        if not shards:
            but = f", but {packed:,} that are compressed: pods read parts of a tar, so unpack them first"
            raise EmptyDataset(f"{store.url} holds no .tar{but * bool(packed)}")
        summary = IndexSummary()
        with (
            Progress("indexing", sum(shard.size_bytes for shard in shards), quiet=quiet) as progress,
            tempfile.TemporaryDirectory(prefix="refill-index-") as folder,
            IndexWriter(Path(folder)) as writer,
        ):
            if in_processes is None:
                in_processes = sum(shard.size_bytes for shard in shards) >= _MUCH_BYTES
            if in_processes:
                workers = WorkerProcesses(min(jobs, len(shards)), url, settings, progress.advance)
                await _read_in_processes(workers, shards, writer, summary)
            else:
                await _read_all(store, shards, jobs, writer, summary, progress.advance)
            if writer.num_samples == 0:
                raise EmptyDataset(f"{store.url}: its {len(shards)} tars hold no samples (files named KEY.EXTENSION)")
            index = await asyncio.to_thread(writer.finish, {"made_by": "index"})
            if writer.labels is not None:
                await store.write(LABELS_KEY, writer.labels)
            await store.write(INDEX_KEY, index)
            summary.num_samples, summary.num_blobs = writer.num_samples, writer.num_blobs
            summary.blob_bytes = writer.blob_bytes
        return summary
    finally:
        await store.close()


async def _refuse_unless_free(store: ObjectStore, force: bool) -> None:
    if await marker_of(store) is not None:
        raise DatasetExists(
            f"{store.url}: a pack is writing there, or was broken off ({MARKER_KEY} is there), its blobs are not"
            " complete; let `refill pack` end, or start it again"
        )
    try:
        await store.head(INDEX_KEY)
    except StoreNotFound:
        return
    if not force:
        raise DatasetExists(f"{store.url} has an index already; replace it with --force")


async def _read_all(
    store: ObjectStore,
    shards: list[ListedObject],
    jobs: int,
    writer: IndexWriter,
    summary: IndexSummary,
    on_bytes: Callable[[int], None],
) -> None:
    """``jobs`` shards at once; their records go to the writer in the order of the shards."""
    loop = asyncio.get_running_loop()
    stop = threading.Event()
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="index")
    waiting: deque[tuple[ListedObject, asyncio.Future[_FoundInShard]]] = deque()

    def read(shard: ListedObject) -> _FoundInShard:
        return _read_one(store, shard, loop, stop, on_bytes)

    try:
        for shard in shards:
            waiting.append((shard, loop.run_in_executor(pool, read, shard)))
            if len(waiting) >= 2 * jobs:
                _take(waiting[0][0], await waiting[0][1], writer, summary)
                waiting.popleft()
        while waiting:
            _take(waiting[0][0], await waiting[0][1], writer, summary)
            waiting.popleft()
    finally:
        # After an error the threads end at their next range; the store must not be closed under them.
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*(result for _, result in waiting), return_exceptions=True)


async def _read_in_processes(
    workers: WorkerProcesses, shards: list[ListedObject], writer: IndexWriter, summary: IndexSummary
) -> None:
    """The same."""
    waiting: deque[tuple[ListedObject, asyncio.Task[_FoundInShard]]] = deque()

    async def take() -> None:
        shard, found = waiting[0]
        _take(shard, await found, writer, summary)
        waiting.popleft()

    try:
        for shard in shards:
            if len(waiting) == 2 * workers.count:
                await take()
            waiting.append((shard, asyncio.create_task(workers.carry_out(_read_in_process, shard))))
        while waiting:
            await take()
    finally:
        await workers.close()
        for _, found in waiting:
            found.cancel()
        await asyncio.gather(*(found for _, found in waiting), return_exceptions=True)


def _read_in_process(worker: Worker, shard: ListedObject) -> _FoundInShard:
    return _read_one(worker.store, shard, worker.loop, worker.stop, worker.on_bytes)


def _read_one(
    store: ObjectStore,
    shard: ListedObject,
    loop: asyncio.AbstractEventLoop,
    stop: Stop,
    on_bytes: Callable[[int], None],
) -> _FoundInShard:
    report = ShardReport()
    ranges = _RangesAhead(store, shard, loop, stop, on_bytes)
    try:
        batches = list(read_shard(shard.key, store.url_of(shard.key), shard.size_bytes, ranges.read, report))
    except ObjectTooShort as error:
        raise SampleDamaged(
            f"{store.url_of(shard.key)}: it shrank while it was read, from {shard.size_bytes} bytes",
            blob=shard.key,
            sample=None,
            start=0,
            end=shard.size_bytes,
        ) from error
    finally:
        ranges.close()
    return batches, report


def _take(
    shard: ListedObject,
    found: _FoundInShard,
    writer: IndexWriter,
    summary: IndexSummary,
) -> None:
    batches, report = found
    writer.add_blob(shard.key, shard.size_bytes, batches, np.array(report.labels, dtype=np.int32))
    summary.num_passed_over += report.num_passed_over
    if report.repeated is not None:
        first, again = report.repeated
        summary.warnings.append(
            f"{shard.key}: its samples {first} and {again} have the same key but lie apart; kept as two samples"
        )
    if report.num_samples == 0:
        summary.warnings.append(f"{shard.key}: holds no samples")


class _RangesAhead:
    """For one thread: a range of the shard, while the next one is on its way."""

    def __init__(
        self,
        store: ObjectStore,
        shard: ListedObject,
        loop: asyncio.AbstractEventLoop,
        stop: Stop,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._store = store
        self._shard = shard
        self._loop = loop
        self._stop = stop
        self._on_bytes = on_bytes
        self._next: tuple[int, Future[memoryview]] | None = None

    def read(self, start: int, end: int) -> memoryview:
        if self._stop.is_set():
            raise InvalidInput("broken off")
        if self._next is None or self._next[0] != start:
            self._next = start, self._ask(start, end)
        asked = self._next[1]
        self._next = None
        if end < self._shard.size_bytes:
            self._next = end, self._ask(end, min(end + RANGE_BYTES, self._shard.size_bytes))
        data = asked.result()
        self._on_bytes(len(data))
        return data

    def close(self) -> None:
        if self._next is not None:
            self._next[1].cancel()

    def _ask(self, start: int, end: int) -> Future[memoryview]:
        return asyncio.run_coroutine_threadsafe(self._store.read_range(self._shard.key, start, end), self._loop)
