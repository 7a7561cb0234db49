"""How do ``pack`` and ``index`` use all cores? Processes that take a tar at a time, and talk to the store themselves.

What they send back is small: records and labels. Who is interrupted tells them to stop, and waits until they have; they
end with the process that began them, however that ends.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from refill.errors import InvalidInput
from refill_service.object_store.base import ObjectStore
from refill_service.object_store.open_store import open_store
from refill_service.object_store.store_settings import StoreSettings

__all__ = ["Stop", "Worker", "WorkerProcesses"]

T = TypeVar("T")

_COUNTED_BYTES = 1 << 20
"""Progress is told in steps of about so much."""
_LOOK_SECONDS = 0.2


class Stop(Protocol):
    """An event, of threads or of processes."""

    def is_set(self) -> bool: ...


class WorkerProcesses:
    """``count`` processes, each with the store at ``url`` open.

    :param on_bytes: called with the number of bytes that were done meanwhile.
    """

    def __init__(self, count: int, url: str, settings: StoreSettings | None, on_bytes: Callable[[int], None]) -> None:
        self.count = count
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
        """What is under way is broken off, and has ended when this returns."""
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


class Worker:
    """What work has in its process."""

    def __init__(self, url: str, settings: StoreSettings | None, stop: Stop, done_bytes: Any) -> None:
        self.stop = stop
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self._done_bytes, self._untold_bytes = done_bytes, 0
        self.store: ObjectStore = self.wait_for(_opened(url, settings))

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Of the store, whose loop is another thread's."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def check(self) -> None:
        """Raises when it is to stop."""
        if self.stop.is_set():
            raise InvalidInput("broken off")

    def on_bytes(self, num_bytes: int) -> None:
        """Fact: so much is done. Threads that race for it may leave a little untold until the end."""
        self._untold_bytes += num_bytes
        if self._untold_bytes >= _COUNTED_BYTES:
            self.tell()

    def tell(self) -> None:
        untold_bytes, self._untold_bytes = self._untold_bytes, 0
        with self._done_bytes.get_lock():
            self._done_bytes.value += untold_bytes


_worker: Worker | None = None


async def _opened(url: str, settings: StoreSettings | None) -> ObjectStore:
    return open_store(url, settings)


def _begin(url: str, settings: StoreSettings | None, stop: Stop, done_bytes: Any) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the whole group: who began this process says what to do
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = Worker(url, settings, stop, done_bytes)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        with suppress(OSError):
            parent.join()
        os._exit(1)


def _carried_out(work: Callable[..., T], *arguments: Any) -> T:
    assert _worker is not None
    _worker.check()
    try:
        return work(_worker, *arguments)
    finally:
        _worker.tell()
