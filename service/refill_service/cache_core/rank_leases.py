"""Which training process is a rank at present? Whoever asked last, until it has been silent for a while.

A rank has one life at a time (:mod:`refill.protocol.rank_life`). Another one that asks has to wait for as long as the
holder may still be there: a process that was killed and started again goes on then. When the holder goes on being
heard, there are two processes that call themselves the same, and the newcomer is refused for good. One that is silent
and has a connection stands still: it may be stopped, or get no time on a busy machine, and keeps its place.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field

from refill.protocol.rank_life import RankLife

LEASE_SECONDS = 10.0
"""Three times as long as training processes let pass without a word (client/refill/pods/home_watch.py)."""
_REMEMBERED = 16
"""So many newcomers of a lease, and lives of a rank that have ended."""


@dataclass(frozen=True)
class Refusal:
    """Why a life is not the rank.

    :param holder: which one is, or was the last.
    :param held_seconds: since it became the rank.
    :param silent_seconds: since it was heard.
    :param final: whether waiting does not help.
    :param ended: whether the refused one was said to have ended.
    :param stands_still: whether the holder is silent, and there all the same.
    """

    holder: RankLife
    held_seconds: float
    silent_seconds: float
    final: bool
    ended: bool = False
    stands_still: bool = False


@dataclass
class _Lease:
    """Which process is a rank, and who else has asked as it meanwhile."""

    holder: RankLife
    since: float
    heard: float
    newcomers: dict[RankLife, float] = field(default_factory=dict)
    """Others that have asked meanwhile, and when for the first time."""

    def refusal(self, now: float, *, final: bool, ended: bool = False, stands_still: bool = False) -> Refusal:
        return Refusal(self.holder, now - self.since, now - self.heard, final, ended, stands_still)


class RankLeases:
    """Decides which process is a rank of one job, at one pod. ``now`` is in seconds, and never goes back.

    :param connected: lives that have a connection, which their machine would close if they ended; asked at each
        decision.
    """

    def __init__(self, connected: Container[RankLife] = frozenset()) -> None:
        self._connected = connected
        self._leases: dict[int, _Lease] = {}
        self._ended: dict[int, dict[RankLife, _Lease]] = {}
        """Lives that others have taken a rank over from, and the lease of who did. They may still have workers."""

    def ranks_heard(self, now: float) -> list[int]:
        """Ranks whose holder may still be there."""
        return sorted(rank for rank in self._leases if self.is_heard(rank, now))

    def is_heard(self, rank: int, now: float) -> bool:
        """Whether its holder may still be there."""
        lease = self._leases.get(rank)
        return lease is not None and now - lease.heard < LEASE_SECONDS

    def silent_seconds(self, now: float, cut_off: Container[RankLife]) -> float:
        """For how long no holder was heard; 0 while one of them is not ``cut_off``. Infinite where there is no
        holder."""
        leases = self._leases.values()
        return min((now - lease.heard if lease.holder in cut_off else 0.0 for lease in leases), default=math.inf)

    def holder(self, rank: int) -> RankLife | None:
        lease = self._leases.get(rank)
        return None if lease is None else lease.holder

    def holders(self) -> set[RankLife]:
        return {lease.holder for lease in self._leases.values()}

    def asks(self, rank: int, life: RankLife, now: float, *, takes: bool = True) -> Refusal | None:
        """Fact: a life asks for samples of the rank. None: it is the rank, from now on if it was not before.

        :param takes: False: it only reports something for the rank, and gets no lease by that.
        """
        ended = self._ended.get(rank, {})
        if life in ended:
            return self._leases.get(rank, ended[life]).refusal(now, final=True, ended=True)
        lease = self._leases.get(rank)
        if lease is None or (lease.holder != life and not self._may_be_there(lease, now)):
            if takes:
                self._leases[rank] = _Lease(life, now, now)
            return None
        if lease.holder == life:
            lease.heard = now
            return None
        first = lease.newcomers.setdefault(life, now)
        _drop_oldest(lease.newcomers)
        # Not before: what is heard of a process that was killed comes from its workers, which outlive it by seconds.
        final, stands_still = lease.heard - first > LEASE_SECONDS, now - lease.heard > LEASE_SECONDS
        return lease.refusal(now, final=final, stands_still=stands_still)

    def _may_be_there(self, lease: _Lease, now: float) -> bool:
        return now - lease.heard <= LEASE_SECONDS or lease.holder in self._connected

    def heard(self, rank: int, life: RankLife, now: float) -> None:
        """Fact: the process of this life is there. Renews its lease if it has one, and gives it none."""
        lease = self._leases.get(rank)
        if lease is not None and lease.holder == life:
            lease.heard = now

    def held_elsewhere(self, rank: int, holder: RankLife, by: RankLife, now: float) -> None:
        """Fact: another pod has refused ``by`` since ``holder`` is the rank. If nobody is the rank here, that one is,
        as long as it may take to be heard; once for each ``by``, which is not to wait for a holder that is gone."""
        lease = self._leases.get(rank)
        if lease is not None:
            was_told = lease.holder == holder and by in lease.newcomers
            if was_told or lease.holder == by or self._may_be_there(lease, now):
                return
        if by != holder and holder not in self._ended.get(rank, {}):
            self._leases[rank] = _Lease(holder, now, now)

    def returned(self, rank: int, life: RankLife) -> None:
        """Fact: a life needs the rank no more, for now."""
        if self.holder(rank) == life:
            del self._leases[rank]

    def ended(self, rank: int, life: RankLife, by: RankLife, now: float, *, takes: bool = True) -> Refusal | None:
        """Fact: ``by`` has seen that the process of a life is gone, and asks in its place. Answer and ``takes`` as
        those of :meth:`asks`. Who was said to have ended has the rank again where the one that took it over is gone: a
        process that had left it to one that it started."""
        replaced = self._ended.get(rank, {})
        if by == life or (by in replaced and self._leases.get(rank, replaced[by]).holder != life):
            return self.asks(rank, by, now, takes=takes)
        replaced.pop(by, None)
        self.returned(rank, life)
        refusal = self.asks(rank, by, now, takes=takes)
        ended = self._ended.setdefault(rank, {})
        ended[life] = self._leases.get(rank) or _Lease(by, now, now)
        _drop_oldest(ended)
        return refusal


def _drop_oldest(known: dict[RankLife, float] | dict[RankLife, _Lease]) -> None:
    while len(known) > _REMEMBERED:
        known.pop(next(iter(known)))
