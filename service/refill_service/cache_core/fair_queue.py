"""Whose turn is it, when several jobs wait for the same thing? Start-time fair queueing over jobs, by bytes.

Goyal, Vin and Cheng, *Start-time Fair Queueing* (SIGCOMM 1996), with equal weights and a tag for each job rather than
for each request, so that a request that is given up costs its job nothing. A job's tag moves on by the bytes of each
of its requests that is served; the job with the least tag is next. A job that comes back after it had nothing waiting
starts from where the others are: it has saved nothing up. So while two jobs both have requests waiting, what they get
differs by no more than their largest requests together, and a job alone gets everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["FairQueue", "Waiting"]

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class Waiting(Generic[Item]):
    """A request that waits."""

    job: Hashable
    size_bytes: int
    item: Item
    urgent: bool = False


@dataclass
class _Turns(Generic[Item]):
    """The requests of one kind, urgent or not. Every job here has one at least."""

    of_jobs: dict[Hashable, deque[Waiting[Item]]] = field(default_factory=dict)
    tags: dict[Hashable, int] = field(default_factory=dict)
    """Bytes at which each job's next request starts; kept for a job with nothing waiting while it is ahead."""
    now: int = 0
    """The tag of the request that was served last."""

    def put(self, waiting: Waiting[Item]) -> None:
        if waiting.job not in self.of_jobs:
            self.of_jobs[waiting.job] = deque()
            self.tags[waiting.job] = max(self.now, self.tags.get(waiting.job, 0))
        self.of_jobs[waiting.job].append(waiting)

    def heads(self) -> list[Waiting[Item]]:
        return [self.of_jobs[job][0] for job in sorted(self.of_jobs, key=self.tags.__getitem__)]

    def serve(self, waiting: Waiting[Item]) -> None:
        self.now = max(self.now, self.tags[waiting.job])
        self.tags[waiting.job] += waiting.size_bytes
        self.discard(waiting)
        for job in [job for job, tag in self.tags.items() if tag <= self.now and job not in self.of_jobs]:
            del self.tags[job]

    def discard(self, waiting: Waiting[Item]) -> None:
        requests = self.of_jobs[waiting.job]
        requests.remove(waiting)
        if not requests:
            del self.of_jobs[waiting.job]


class FairQueue(Generic[Item]):
    """Requests that wait, in order within a job; urgent ones before all others."""

    def __init__(self) -> None:
        self._urgent: _Turns[Item] = _Turns()
        self._others: _Turns[Item] = _Turns()

    def __bool__(self) -> bool:
        return bool(self._urgent.of_jobs or self._others.of_jobs)

    def put(self, waiting: Waiting[Item]) -> None:
        self._turns(waiting).put(waiting)

    def heads(self) -> Iterator[Waiting[Item]]:
        """The first request of each job, whose turn it is first."""
        yield from self._urgent.heads()
        yield from self._others.heads()

    def serve(self, waiting: Waiting[Item]) -> None:
        """Fact: this one is served, which its job has had then."""
        self._turns(waiting).serve(waiting)

    def discard(self, waiting: Waiting[Item]) -> None:
        """Fact: this one does not wait any more. Raises :class:`KeyError` or :class:`ValueError` when it does not."""
        self._turns(waiting).discard(waiting)

    def _turns(self, waiting: Waiting[Item]) -> _Turns[Item]:
        return self._urgent if waiting.urgent else self._others
