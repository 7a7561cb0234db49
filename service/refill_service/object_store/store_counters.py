"""How much was asked of a store, and how did it answer? Plain counters, to be read at scrape."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from refill.errors import RefillError

__all__ = ["OPERATIONS", "CountedRequest", "OperationCounters", "StoreCounters"]

OPERATIONS = ("read_range", "write", "list", "head", "delete")


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
    def counted(self, operation: str) -> Iterator[CountedRequest]:
        counters = self.operations[operation]
        request = CountedRequest(operation)
        counters.in_flight += 1
        started = time.perf_counter()
        try:
            yield request
        except RefillError as error:
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
