"""Whose turn is it, when several jobs wait for the same thing? Start-time fair queueing over jobs, by bytes.

Goyal, Vin and Cheng, *Start-time Fair Queueing* (SIGCOMM 1996), with equal weights and a tag for each job rather than
for each request, so that a request that is given up costs its job nothing. A job's tag moves on by the bytes of each
of its requests that is served; the job with the least tag is next. A job that comes back after it had nothing waiting
starts from where the others are: it has saved nothing up. So while two jobs both have requests waiting, what they get
differs by no more than their largest requests together, and a job alone gets everything.
"""

from __future__ import annotations

from bisect import insort
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
    due: int | None = None
    """Where in the job's order it is that somebody waits for it; None: nobody does."""


@dataclass
class _OfJob(Generic[Item]):
    """What one job waits for."""

    urgent: list[Waiting[Item]] = field(default_factory=list)
    """Those that somebody waits for, what is due first in front."""
    others: deque[Waiting[Item]] = field(default_factory=deque)

    def put(self, waiting: Waiting[Item]) -> None:
        if waiting.due is None:
            self.others.append(waiting)
        else:
            insort(self.urgent, waiting, key=lambda each: each.due or 0)

    def remove(self, waiting: Waiting[Item]) -> None:
        (self.others if waiting.due is None else self.urgent).remove(waiting)

    @property
    def head(self) -> Waiting[Item]:
        return self.urgent[0] if self.urgent else self.others[0]


class FairQueue(Generic[Item]):
    """Requests that wait. Those of a job that somebody waits for go before its others, in the order in which they are
    due, and not before those of other jobs: how urgent a request is, its own job says. Beside that a job's are in
    order.

    :param saved_bytes: a job that wants less than its part saves up so much of it, and then goes before others.
    """

    def __init__(self, saved_bytes: int = 0) -> None:
        self._saved_bytes = saved_bytes
        self._of_jobs: dict[Hashable, _OfJob[Item]] = {}
        """Every job here waits for something."""
        self._tags: dict[Hashable, int] = {}
        """Bytes at which each job's next request starts; kept for a job with nothing waiting while it is ahead."""
        self._now = 0
        """The tag of the request that was served last."""

    def __bool__(self) -> bool:
        return bool(self._of_jobs)

    def has(self, job: Hashable) -> bool:
        return job in self._of_jobs

    def has_others(self, job: Hashable) -> bool:
        """Whether another job waits for something."""
        return len(self._of_jobs) > (job in self._of_jobs)

    def would_be_next(self, job: Hashable) -> bool:
        """Whether others wait, and a request of this job would be served before any of theirs."""
        starts_at = self._starts_at(job)
        return bool(self._of_jobs) and all(starts_at < self._tags[each] for each in self._of_jobs)

    def put(self, waiting: Waiting[Item]) -> None:
        if waiting.job not in self._of_jobs:
            self._of_jobs[waiting.job] = _OfJob()
            self._tags[waiting.job] = self._starts_at(waiting.job)
        self._of_jobs[waiting.job].put(waiting)

    def heads(self) -> Iterator[Waiting[Item]]:
        """The first request of each job, whose turn it is first."""
        for job in sorted(self._of_jobs, key=self._tags.__getitem__):
            yield self._of_jobs[job].head

    def serve(self, waiting: Waiting[Item]) -> None:
        """Fact: this one is served, which its job has had then."""
        self._now = max(self._now, self._tags[waiting.job])
        self._tags[waiting.job] += waiting.size_bytes
        self.discard(waiting)
        for job in [
            job for job, tag in self._tags.items() if tag <= self._now - self._saved_bytes and job not in self._of_jobs
        ]:
            del self._tags[job]

    def charge(self, job: Hashable, size_bytes: int) -> None:
        """Fact: a job has had so much, beside the size of its requests."""
        self._tags[job] = self._starts_at(job) + size_bytes

    def _starts_at(self, job: Hashable) -> int:
        earliest = self._now - self._saved_bytes
        return max(earliest, self._tags.get(job, earliest))

    def discard(self, waiting: Waiting[Item]) -> None:
        """Fact: this one does not wait any more. Raises :class:`KeyError` or :class:`ValueError` when it does not."""
        of_job = self._of_jobs[waiting.job]
        of_job.remove(waiting)
        if not of_job.urgent and not of_job.others:
            del self._of_jobs[waiting.job]
