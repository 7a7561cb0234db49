"""Does a training process get answers as a rank, or is another one this rank already? Decided by
:mod:`refill_service.cache_core.rank_leases`, and said here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Protocol

from refill.errors import RankHeld, RankTaken
from refill.protocol.rank_life import RankLife
from refill_service.cache_core.rank_leases import LEASE_SECONDS, RankLeases, Refusal

log = logging.getLogger(__name__)

_SAID_OF = 1000
"""Refused processes that are known to have been logged."""


class Connection(Protocol):
    """A client's connection, which calls back when it is lost."""

    def when_lost(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called once, when it is gone."""

    passes_on: bool
    """Whether what comes over it is passed on for others, which may end while it stays."""

    def is_answered(self) -> bool:
        """Whether the machine at its other end is there, as far as is known."""


class _Connections:
    """Open ones of processes that hold a lease, and of their loader workers. Contains a life that has one of its own,
    by which it is known to be there: machines close those of processes that end."""

    def __init__(self) -> None:
        self.of: dict[RankLife, set[Connection]] = {}
        self._shared: set[Connection] = set()
        self._watched: set[Connection] = set()

    def __contains__(self, life: object) -> bool:
        found = self.of.get(life, ()) if isinstance(life, RankLife) else ()
        return any(each not in self._shared and each.is_answered() for each in found)

    def add(self, life: RankLife, connection: Connection) -> None:
        if connection.passes_on or any(connection in others for others in self.of.values()):
            self._shared.add(connection)
        self.of.setdefault(life, set()).add(connection)
        if connection not in self._watched:
            self._watched.add(connection)
            connection.when_lost(partial(self._is_lost, connection))

    def forget(self, life: RankLife) -> None:
        """Fact: it holds no lease. What it asks over may be a proxy's, which outlives it."""
        self._shared |= self.of.pop(life)

    def _is_lost(self, connection: Connection) -> None:
        for known in (*self.of.values(), self._shared, self._watched):
            known.discard(connection)


class LeasedRanks:
    """Refuses a second process of a rank of one job, by name, at one pod. A client that does not name its process is
    not asked for it."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._connections = _Connections()
        self._leases = RankLeases(self._connections)
        self._refused: set[tuple[int, RankLife]] = set()

    @property
    def connected(self) -> list[RankLife]:
        """Whose connections are known."""
        return list(self._connections.of)

    def holder(self, rank: int) -> RankLife | None:
        return self._leases.holder(rank)

    def alive(self) -> list[int]:
        """Ranks whose process was heard within the time of a lease."""
        return self._leases.ranks_heard(time.monotonic())

    def is_alive(self, rank: int) -> bool:
        """Whether it is one of those."""
        return self._leases.is_heard(rank, time.monotonic())

    def silent_seconds(self) -> float:
        """As :meth:`RankLeases.silent_seconds`: of processes that had connections here, and have none any more."""
        cut_off = [life for life, open_ones in self._connections.of.items() if not open_ones]
        return self._leases.silent_seconds(time.monotonic(), cut_off)

    def asks(self, rank: int, life: RankLife | None, *, takes: bool = True, over: Connection | None = None) -> None:
        """Fact: a process asks for samples of a rank. Raises :class:`RankHeld` while another one may still be there,
        and :class:`RankTaken` when it is.

        :param takes: False: it reports something for the rank, and asks for no samples.
        :param over: what it asks over, if that is known.
        """
        if life is None:
            return
        if (refusal := self._leases.asks(rank, life, time.monotonic(), takes=takes)) is not None:
            raise self._error(rank, life, refusal)
        self._is_connected(rank, life, over)

    def held_elsewhere(self, rank: int, holder: RankLife, by: RankLife) -> None:
        """As :meth:`RankLeases.held_elsewhere`."""
        self._leases.held_elsewhere(rank, holder, by, time.monotonic())

    def heard(self, rank: int, life: RankLife | None, over: Connection | None = None) -> None:
        """Fact: a process is there, and asks for no samples now."""
        if life is not None:
            self._leases.heard(rank, life, time.monotonic())
            self._is_connected(rank, life, over)

    def _is_connected(self, rank: int, life: RankLife, connection: Connection | None) -> None:
        known = self._connections.of
        if connection is None or connection in known.get(life, ()) or self.holder(rank) != life:
            return
        holders = self._leases.holders()
        for other in [each for each in known if each not in holders]:
            self._connections.forget(other)  # over a connection that stays, many may follow each other
        self._connections.add(life, connection)

    def returned(self, rank: int, life: RankLife) -> None:
        """Fact: a process needs the rank no more."""
        self._leases.returned(rank, life)

    def ended(self, rank: int, life: RankLife, by: RankLife, *, takes: bool = True) -> None:
        """Fact: ``by`` has seen that a process is gone, or has left the rank to it, and asks in its place. ``takes``
        and errors as those of :meth:`asks`."""
        if self.holder(rank) == life:
            log.info("rank %d of job %s: %s goes on in place of %s", rank, self._job, by, life)
        if (refusal := self._leases.ended(rank, life, by, time.monotonic(), takes=takes)) is not None:
            raise self._error(rank, by, refusal)

    def _error(self, rank: int, life: RankLife, refusal: Refusal) -> RankTaken:
        holder = refusal.holder
        details = {"rank": rank, "holder": holder.encode(), "held_seconds": refusal.held_seconds}
        if refusal.stands_still and not refusal.final:
            return RankHeld(
                f"rank {rank} of job {self._job} is {holder}, which has a connection and was heard "
                f"{refusal.silent_seconds:.0f} s ago: it stands still. If you end it, this one goes on; two runs need "
                "two job names",
                **details,
            )
        if not refusal.final:
            wait_seconds = max(0.0, LEASE_SECONDS - refusal.silent_seconds)
            return RankHeld(
                f"rank {rank} of job {self._job} is {holder}, heard {refusal.silent_seconds:.0f} s ago: if that was "
                f"ended, this one goes on in {wait_seconds:.0f} s",
                **details,
            )
        since = (datetime.now(UTC) - timedelta(seconds=refusal.held_seconds)).strftime("%Y-%m-%d %H:%M:%S UTC")
        what = f"was replaced as rank {rank}" if refusal.ended else f"calls itself rank {rank}"
        error = RankTaken(
            f"{life} {what} of job {self._job}, and {holder} has been that rank since {since}: stop one of them; two "
            "runs need two job names, and each process of a run a rank of its own (RANK, or rank=)",
            **details,
        )
        if (rank, life) not in self._refused:
            if len(self._refused) >= _SAID_OF:
                self._refused.clear()
            self._refused.add((rank, life))
            log.warning("%s", error.message)
        return error
