"""Whose turn is it, when several jobs wait for the same thing? Start-time fair queueing over teams and, within each,
over its jobs, by bytes.

Goyal, Vin and Cheng, *Start-time Fair Queueing* (SIGCOMM 1996), with equal weights and a tag for each job rather than
for each request, so that a request that is given up costs its job nothing. A job's tag moves on by the bytes of each
of its requests that is served; the job with the least tag is next. A job that comes back after it had nothing waiting
starts from where the others are: it has saved nothing up. So while two jobs both have requests waiting, what they get
differs by no more than their largest requests together, and a job alone gets everything. A team takes its turns among
teams as a job does among those of its team: so it gets no more with many jobs than with one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Need:
    """Does somebody wait for what is being fetched? That may become known while it waits for its turn.

    :param due: where in its job's order it is that somebody waits for it; None: nobody does.
    :param near: what is due no further on than this behind another one is needed about as soon. None: all is.
    :param ahead: where somebody will wait for it, in the same order; None: it is not known.
    """

    def __init__(self, due: int | None = None, near: int | None = None, ahead: int | None = None) -> None:
        self.due, self.near, self.ahead = due, near, ahead
        self._told: dict[Callable[[], None], None] = {}

    def is_due(self, due: int) -> None:
        """Fact: somebody waits for it, there; others may do so further on."""
        if self.due is None or due < self.due:
            self.due = due
            for tell in list(self._told):
                tell()

    @contextmanager
    def telling(self, tell: Callable[[], None]) -> Iterator[None]:
        """Meanwhile this is called when it becomes due, or due earlier."""
        self._told[tell] = None
        try:
            yield
        finally:
            del self._told[tell]


@dataclass(eq=False)
class Waiting(Generic[Item]):
    """A request that waits."""

    job: Hashable
    size_bytes: int
    item: Item
    due: int | None = None
    """Where in the job's order it is that somebody waits for it; None: nobody does."""
    near: int | None = None
    ahead: int | None = None
    """As of :class:`Need`."""


@dataclass
class _OfJob(Generic[Item]):
    """What one job waits for."""

    urgent: list[Waiting[Item]] = field(default_factory=list)
    """Those that somebody waits for, what is due first in front."""
    ahead: list[Waiting[Item]] = field(default_factory=list)
    """Those that somebody will wait for, at a place that is known, what comes first in front. So few that a list does:
    some dozens of each share (``ReadQueue``)."""
    others: OrderedDict[Waiting[Item], None] = field(default_factory=OrderedDict)
    """In the order in which they came. A job that ends gives up all of them, of which there may be very many."""

    def put(self, waiting: Waiting[Item]) -> None:
        if waiting.due is not None:
            insort(self.urgent, waiting, key=_due)
        elif waiting.ahead is not None:
            insort(self.ahead, waiting, key=_ahead)
        else:
            self.others[waiting] = None

    def remove(self, waiting: Waiting[Item]) -> None:
        if waiting.due is not None:
            del self.urgent[self.urgent.index(waiting, bisect_left(self.urgent, waiting.due, key=_due))]
        elif waiting.ahead is not None:
            del self.ahead[self.ahead.index(waiting, bisect_left(self.ahead, waiting.ahead, key=_ahead))]
        else:
            del self.others[waiting]

    @property
    def num_waiting(self) -> int:
        return len(self.urgent) + len(self.ahead) + len(self.others)

    @property
    def head(self) -> Waiting[Item]:
        return self.urgent[0] if self.urgent else self.ahead[0] if self.ahead else next(iter(self.others))


def _due(waiting: Waiting[Item]) -> int:
    return waiting.due or 0


def _ahead(waiting: Waiting[Item]) -> int:
    return waiting.ahead or 0


class _Turns:
    """Of some parties, which are teams, or the jobs of one."""

    def __init__(self, saved_bytes: int) -> None:
        self._saved_bytes = saved_bytes
        self.tags: dict[Hashable, int] = {}
        """Bytes at which each party's next request starts; kept for one with nothing waiting while it is ahead."""
        self._now = 0
        """The tag of the request that was served last."""

    def starts_at(self, party: Hashable) -> int:
        earliest = self._now - self._saved_bytes
        return max(earliest, self.tags.get(party, earliest))

    def waits(self, party: Hashable) -> None:
        """Fact: it had nothing waiting, and now has."""
        self.tags[party] = self.starts_at(party)

    def charge(self, party: Hashable, size_bytes: int) -> None:
        self.tags[party] = self.starts_at(party) + size_bytes

    def served(self, party: Hashable, size_bytes: int, waiting: Container[Hashable]) -> None:
        """Fact: a party, which may wait for more as others do, has had its turn."""
        self._now = max(self._now, self.tags[party])
        self.tags[party] += size_bytes
        earliest = self._now - self._saved_bytes
        for other in [each for each, tag in self.tags.items() if tag <= earliest and each not in waiting]:
            del self.tags[other]


class FairQueue(Generic[Item]):
    """Requests that wait. Those of a job that somebody waits for go before its others, in the order in which they are
    due, and not before those of other jobs: how urgent a request is, its own job says. Then come those of which it is
    known where somebody will wait for them, and the rest in order.

    :param saved_bytes: a team that wants less than its part saves up so much of it, and then goes before others; and so
        does a job in its team.
    :param team_of: a job's team; None: each is its own.
    """

    def __init__(self, saved_bytes: int = 0, team_of: Callable[[Hashable], Hashable] | None = None) -> None:
        self._saved_bytes = saved_bytes
        self._team_of = team_of or (lambda job: job)
        self._of_jobs: dict[Hashable, dict[Hashable, _OfJob[Item]]] = {}
        """By team. Every team and every job here waits for something."""
        self._of_teams = _Turns(saved_bytes)
        self._in_team: dict[Hashable, _Turns] = {}
        """Of the jobs of each team that has a tag."""

    def __bool__(self) -> bool:
        return bool(self._of_jobs)

    def has(self, job: Hashable) -> bool:
        return job in self._of_jobs.get(self._team_of(job), ())

    def num_waiting(self, job: Hashable) -> int:
        """Requests of this job."""
        found = self._of_jobs.get(self._team_of(job), {}).get(job)
        return 0 if found is None else found.num_waiting

    def has_others(self, job: Hashable) -> bool:
        """Whether another job waits for something."""
        own = self._of_jobs.get(self._team_of(job), {})
        return len(self._of_jobs) > bool(own) or len(own) > (job in own)

    def would_be_next(self, job: Hashable) -> bool:
        """Whether others wait, and a request of this job would be served before any of theirs."""
        team = self._team_of(job)
        starts_at = self._of_teams.starts_at(team)
        if any(starts_at >= self._of_teams.tags[other] for other in self._of_jobs if other != team):
            return False
        in_team = self._turns_in(team)
        starts_at = in_team.starts_at(job)
        return bool(self._of_jobs) and all(starts_at < in_team.tags[other] for other in self._of_jobs.get(team, ()))

    def put(self, waiting: Waiting[Item]) -> None:
        team = self._team_of(waiting.job)
        if team not in self._of_jobs:
            self._of_jobs[team] = {}
            self._of_teams.waits(team)
        of_jobs = self._of_jobs[team]
        if waiting.job not in of_jobs:
            of_jobs[waiting.job] = _OfJob()
            self._turns_in(team).waits(waiting.job)
        of_jobs[waiting.job].put(waiting)

    def heads(self) -> Iterator[Waiting[Item]]:
        """The first request of each job, whose turn it is first."""
        for team in sorted(self._of_jobs, key=self._of_teams.tags.__getitem__):
            of_jobs = self._of_jobs[team]
            for job in sorted(of_jobs, key=self._in_team[team].tags.__getitem__):
                yield of_jobs[job].head

    def serve(self, waiting: Waiting[Item]) -> None:
        """Fact: this one is served, which its job has had then."""
        team = self._team_of(waiting.job)
        self.discard(waiting)
        self._in_team[team].served(waiting.job, waiting.size_bytes, self._of_jobs.get(team, ()))
        self._of_teams.served(team, waiting.size_bytes, self._of_jobs)
        for other in self._in_team.keys() - self._of_teams.tags.keys():
            del self._in_team[other]

    def charge(self, job: Hashable, size_bytes: int) -> None:
        """Fact: a job has had so much, beside the size of its requests."""
        team = self._team_of(job)
        self._of_teams.charge(team, size_bytes)
        self._turns_in(team).charge(job, size_bytes)

    def hasten(self, waiting: Waiting[Item], due: int) -> None:
        """Fact: somebody waits for this one there, which waits for its turn."""
        of_job = self._of_jobs[self._team_of(waiting.job)][waiting.job]
        of_job.remove(waiting)
        waiting.due = due
        of_job.put(waiting)

    def discard(self, waiting: Waiting[Item]) -> None:
        """Fact: this one does not wait any more. Raises :class:`KeyError` or :class:`ValueError` when it does not."""
        team = self._team_of(waiting.job)
        of_jobs = self._of_jobs[team]
        of_job = of_jobs[waiting.job]
        of_job.remove(waiting)
        if not of_job.num_waiting:
            del of_jobs[waiting.job]
            if not of_jobs:
                del self._of_jobs[team]

    def _turns_in(self, team: Hashable) -> _Turns:
        if team not in self._in_team:
            self._in_team[team] = _Turns(self._saved_bytes)
        return self._in_team[team]
