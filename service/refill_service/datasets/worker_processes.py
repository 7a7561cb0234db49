"""How do ``pack`` and ``index`` use all cores? Processes that take a tar at a time, and talk to the store themselves.
Where there is little to do, threads of this process do the same.

What comes back is small: records and labels. Who is interrupted tells them to stop, and waits until they have;
processes end with the one that began them, however that ends.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from refill.errors import InvalidInput
from refill_service.object_store.base import ObjectStore
from refill_service.object_store.open_store import open_store
from refill_service.object_store.store_settings import StoreSettings

T = TypeVar("T")

_COUNTED_BYTES = 1 << 20
"""Progress is told in steps of about so much."""
_LOOK_SECONDS = 0.2


class Stop(Protocol):
    """An event, of threads or of processes."""

    def is_set(self) -> bool: ...


class Workers(Protocol):
    """Some that work side by side."""

    most_begun: int
    """So much work is given to them at once."""

    async def carry_out(self, work: Callable[..., T], *arguments: Any) -> T:
        """``work(worker, *arguments)`` by one of them, with a :class:`Worker`. Raises what it raises."""
        ...

    async def close(self) -> None:
        """What is under way is broken off, and has ended when this returns."""


async def in_order(workers: Workers, works: AsyncIterator[Coroutine[Any, Any, T]], take: Callable[[T], None]) -> None:
    """Carry out some of these at once, and take what comes of them in their order. Then the workers are closed, however
    it ends.

    :param works: each made by :meth:`Workers.carry_out`, or done already.
    """
    waiting: deque[asyncio.Task[T]] = deque()

    async def take_first() -> None:
        take(await waiting[0])
        waiting.popleft()

    try:
        while True:
            if len(waiting) == workers.most_begun:
                await take_first()
            if (work := await anext(works, None)) is None:
                break
            waiting.append(asyncio.create_task(work))
        while waiting:
            await take_first()
    finally:
        # A write that was given up may still arrive later: all of them end first.
        await to_the_end(workers.close())
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def to_the_end(work: Coroutine[Any, Any, T], on_cancel: Callable[[], None] | None = None) -> T:
    """Await; when cancelled, wait for the work all the same: a thread, or a write under way, can't be called back."""
    running = asyncio.create_task(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        await asyncio.wait([running])
        raise


class Worker:
    """What work has to do with others: the store, whose loop is another thread's, and word that it is to stop.

    :param on_bytes: called with the number of bytes that were done meanwhile, by any thread.
    """

    def __init__(
        self, store: ObjectStore, loop: asyncio.AbstractEventLoop, stop: Stop, on_bytes: Callable[[int], None]
    ) -> None:
        self.store, self.stop, self.on_bytes = store, stop, on_bytes
        self.loop = loop

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Of the store."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def check(self) -> None:
        """Raises when it is to stop."""
        if self.stop.is_set():
            raise InvalidInput("broken off")


class WorkerThreads:
    """``count`` threads of this process, which share its store.

    :param on_bytes: as of :class:`Worker`.
    :param in_turn: whether nothing is made ready for them while they work.
    """

    def __init__(
        self, count: int, store: ObjectStore, on_bytes: Callable[[int], None], *, in_turn: bool = False
    ) -> None:
        self.most_begun = count if in_turn else 2 * count
        self._stop = threading.Event()
        self._worker = Worker(store, asyncio.get_running_loop(), self._stop, on_bytes)
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="worker")

    async def carry_out(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.wrap_future(self._pool.submit(work, self._worker, *arguments))

    async def close(self) -> None:
        self._stop.set()
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)


class WorkerProcesses:
    """``count`` processes, each with the store at ``url`` open.

    :param on_bytes: called with the number of bytes that were done meanwhile.
    """

    def __init__(self, count: int, url: str, settings: StoreSettings | None, on_bytes: Callable[[int], None]) -> None:
        self.most_begun = 2 * count
        # Not forked: this process has threads, of the store's library, too.
        context = multiprocessing.get_context("spawn")
        self._stop, self._done_bytes = context.Event(), context.Value("q", 0)
        self._told_bytes, self._on_bytes = 0, on_bytes
        self._pool = ProcessPoolExecutor(
            count, mp_context=context, initializer=_begin, initargs=(url, settings, self._stop, self._done_bytes)
        )
        self._looking = asyncio.create_task(self._look())

    async def carry_out(self, work: Callable[..., T], *arguments: Any) -> T:
        """``work(worker, *arguments)`` in one of the processes. Raises what it raises, and :class:`InvalidInput` where
        the process was killed."""
        # A process that begins has interrupts held back, until it ignores them: they come to the whole group.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            try:
                submitted = self._pool.submit(_carried_out, work, *arguments)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return await asyncio.wrap_future(submitted)
        except BrokenProcessPool as error:
            raise InvalidInput(
                "a worker process was killed from outside, perhaps because memory ran out; start again with fewer "
                "--jobs"
            ) from error.with_traceback(None)  # which has the pool, whose semaphores are to go

    async def close(self) -> None:
        self._stop.set()
        self._looking.cancel()
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)
        self._tell()
        # Their semaphores go with them: commands end without taking the interpreter down.
        del self._pool, self._stop, self._done_bytes

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self._tell()

    def _tell(self) -> None:
        done_bytes = self._done_bytes.value
        if done_bytes > self._told_bytes:
            self._on_bytes(done_bytes - self._told_bytes)
            self._told_bytes = done_bytes


# What follows runs in the processes.


class _DoneBytes:
    """Tells the process that began this one how many bytes were done, a step at a time."""

    def __init__(self, done_bytes: Any) -> None:
        self._done_bytes, self._untold_bytes = done_bytes, 0

    def add(self, num_bytes: int) -> None:
        """Threads that race for it may leave a little untold until the end."""
        self._untold_bytes += num_bytes
        if self._untold_bytes >= _COUNTED_BYTES:
            self.tell()

    def tell(self) -> None:
        untold_bytes, self._untold_bytes = self._untold_bytes, 0
        with self._done_bytes.get_lock():
            self._done_bytes.value += untold_bytes


_worker: tuple[Worker, _DoneBytes] | None = None


async def _opened(url: str, settings: StoreSettings | None) -> ObjectStore:
    return open_store(url, settings)


def _begin(url: str, settings: StoreSettings | None, stop: Stop, done_bytes: Any) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the whole group: who began this process says what to do
    threading.Thread(target=_end_with_parent, daemon=True).start()
    loop, done = asyncio.new_event_loop(), _DoneBytes(done_bytes)
    threading.Thread(target=loop.run_forever, daemon=True).start()
    store = asyncio.run_coroutine_threadsafe(_opened(url, settings), loop).result()
    _worker = Worker(store, loop, stop, done.add), done


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        with suppress(OSError):
            parent.join()
        os._exit(1)


def _carried_out(work: Callable[..., T], *arguments: Any) -> T:
    assert _worker is not None
    worker, done = _worker
    worker.check()
    try:
        return work(worker, *arguments)
    finally:
        done.tell()
