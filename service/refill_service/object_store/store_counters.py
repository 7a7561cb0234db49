"""How much was asked of a store, how did it answer, and who waits for one that does not?

Plain counters, to be read at scrape. A request that waits is answered in time with what it waits for: else whoever
asked would blame the pod. And the pod's log says so every ten seconds, as long as it lasts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from refill.errors import RefillError, StoreNotFound, StoreUnavailable

log = logging.getLogger(__name__)

OPERATIONS = ("read_range", "write", "list", "head", "delete")
SAY_EVERY_SECONDS = 10.0


@dataclass
class OperationCounters:
    """Totals of one operation since the start of the process. A retried request counts once."""

    requests: int = 0
    """Ended, well or not."""
    in_flight: int = 0
    bytes: int = 0
    seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    """By class name of the error; ``Cancelled`` for requests that their caller gave up."""


@dataclass
class CountedRequest:
    """What an observer gets of one request that ended."""

    operation: str
    num_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None


class StoreCounters:
    """Counters by operation; ``observe`` is called with each request that ended (for histograms).

    Not locked: the operations of a store run on one event loop.
    """

    def __init__(self, observe: Callable[[CountedRequest], None] | None = None) -> None:
        self.operations = {name: OperationCounters() for name in OPERATIONS}
        self.second_reads = 0
        """Second requests for what a first one, which counts above, took long to bring."""
        self.second_reads_won = 0
        """Of these, those that came first."""
        self._observe = observe

    @contextmanager
    def counted(self, operation: str, *, looks_for: bool = False) -> Iterator[CountedRequest]:
        """:param looks_for: whether what is asked for may not be there: a job that names no dataset is no fault of the
        store's."""
        counters = self.operations[operation]
        request = CountedRequest(operation)
        counters.in_flight += 1
        started = time.perf_counter()
        try:
            yield request
        except RefillError as error:
            if not (looks_for and isinstance(error, StoreNotFound)):
                request.error = type(error).__name__
            raise
        except GeneratorExit:  # a listing that its caller did not read to the end
            raise
        except BaseException as error:
            request.error = "Cancelled" if type(error).__name__ == "CancelledError" else type(error).__name__
            raise
        finally:
            request.seconds = time.perf_counter() - started
            counters.in_flight -= 1
            counters.requests += 1
            counters.bytes += request.num_bytes
            counters.seconds += request.seconds
            if request.error is not None:
                counters.errors[request.error] += 1
            if self._observe is not None:
                self._observe(request)


@asynccontextmanager
async def within(seconds: float, what: str) -> AsyncIterator[None]:
    """Raises :class:`StoreUnavailable` when what it holds takes longer.

    :param what: who waits for what, for the error.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise StoreUnavailable(f"{what}: the store has not answered for {seconds:g} s") from error


class OverdueRequests:
    """Reads of one store that are under way, and a line in the log when one takes long. Belongs to one event loop."""

    def __init__(self) -> None:
        self._under_way: dict[object, tuple[float, str]] = {}
        """Since when, and of what; the oldest first."""
        self._look: asyncio.TimerHandle | None = None

    @contextmanager
    def watched(self, url: str) -> Iterator[None]:
        key = object()
        self._under_way[key] = time.monotonic(), url
        if self._look is None:
            self._look_in(SAY_EVERY_SECONDS)
        try:
            yield
        finally:
            del self._under_way[key]

    def _look_in(self, seconds: float) -> None:
        self._look = asyncio.get_running_loop().call_later(seconds, self._say)

    def _say(self) -> None:
        self._look = None
        if not self._under_way:
            return
        since, url = next(iter(self._under_way.values()))
        waits = time.monotonic() - since
        if waits >= SAY_EVERY_SECONDS:
            log.warning("%d reads wait for the store, the longest for %.0f s: %s", len(self._under_way), waits, url)
            self._look_in(SAY_EVERY_SECONDS)
        else:
            self._look_in(SAY_EVERY_SECONDS - waits)
