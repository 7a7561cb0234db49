"""How many round trips to the store follow each other? A store that answers in rounds: what waits for it is answered
when the pods can't go on without."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from refill_service.object_store.store_settings import StoreSettings
from tests.membership.pods_in_process import PodsInProcess
from tests.s3_gate import Gate

__all__ = ["Rounds", "in_rounds"]

_TURNS = 30
"""Of the event loop, in which nobody has asked for anything."""


class _Threads(ThreadPoolExecutor):
    """Counts what they have to do."""

    def __init__(self) -> None:
        super().__init__(8)
        self.num_busy = 0
        self._counting = threading.Lock()

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        with self._counting:
            self.num_busy += 1
        future = super().submit(work, *arguments, **named)
        future.add_done_callback(self._done)
        return future

    def _done(self, _: object) -> None:
        with self._counting:
            self.num_busy -= 1


class Rounds:
    """Requests wait for their round while ``steps``; else they are answered at once."""

    def __init__(self) -> None:
        self.url = ""
        self.sizes: list[int] = []
        """Bytes of each answer to a GET of samples."""
        self.steps = False
        self._changed = threading.Condition()
        self._round = 0
        self._num_waiting = 0

    def waits(self) -> None:
        with self._changed:
            if not self.steps:
                return
            before = self._round
            self._num_waiting += 1
            self._changed.wait_for(lambda: self._round > before or not self.steps)

    def of(self, pods: PodsInProcess, *work: Callable[[], object]) -> int:
        """Carry out these, each in a thread, when all of them have asked their pods. Returns in how many rounds of the
        store they were done."""
        threads = _Threads()
        pods.do(_set_threads(threads))
        first, self.steps = self._round, True
        with ThreadPoolExecutor(len(work)) as pool:
            doing = [pool.submit(each) for each in work]
            while not all(each.done() for each in doing):
                if pods.do(self._all_wait(pods, threads)):
                    self.answer()
            last = self._round
            self.answer(steps=False)
        for each in doing:
            each.result()
        return last - first

    def nothing_is_under_way(self, pods: PodsInProcess) -> bool:
        """Whether all requests of pods were answered, those of reads ahead, too."""
        return _num_asked(pods) == 0

    async def _all_wait(self, pods: PodsInProcess, threads: _Threads) -> bool:
        """Whether pods have asked for all that they can, and it is all here."""
        for _ in range(_TURNS):
            if not self._num_waiting or self._num_waiting != _num_asked(pods) or threads.num_busy:
                await asyncio.sleep(0.001)  # answers are on their way through another thread
                return False
            await asyncio.sleep(0)
        return True

    def answer(self, *, steps: bool = True) -> None:
        with self._changed:
            self._round += 1
            self._num_waiting = 0
            self.steps = steps
            self._changed.notify_all()


async def _set_threads(threads: _Threads) -> None:
    asyncio.get_running_loop().set_default_executor(threads)


def _num_asked(pods: PodsInProcess) -> int:
    """Requests that are under way to the store."""
    most = StoreSettings().max_connections
    asked = (
        [each.in_flight for each in pods.node(pod).store_counters.operations.values()] for pod in range(pods.num_pods)
    )
    return sum(min(most, sum(each)) for each in asked)


@contextmanager
def in_rounds(upstream: str) -> Iterator[Rounds]:
    """In threads of this process, before an S3 server."""
    rounds = Rounds()

    class InRounds(Gate):
        disable_nagle_algorithm = True

        def refused(self) -> bool:
            rounds.waits()
            return False

        def given(self, data: bytes) -> bytes:
            if self.path.partition("?")[0].endswith(".tar"):
                rounds.sizes.append(len(data))
            return data

    class Server(ThreadingHTTPServer):
        block_on_close = False
        request_queue_size = 256

        def handle_error(self, *_: object) -> None:
            """Who asked has given up."""

    InRounds.upstream, InRounds.secrets, InRounds.read_only = urlsplit(upstream).netloc, {}, set()
    server = Server(("127.0.0.1", 0), InRounds)
    rounds.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield rounds
    finally:
        rounds.steps = False
        rounds.answer(steps=False)
        server.shutdown()
        server.server_close()
        thread.join(10)
