"""Whose connections does a server have, and which gives way when there is no room for another?

A connection is a *stranger's* until one of its requests has shown who it is. A stranger that is not being answered
gives way to whoever comes, the oldest first, so that connections that are merely open keep nobody out. A team has as
many as its quota leaves it.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from refill_service.cache_core.team_quotas import TeamQuotas

__all__ = ["Connection", "ConnectionRoom"]

_SPARE = 64
"""Above the limit, for whoever looks after the pod; others are answered "busy"."""


class Connection(Protocol):
    @property
    def is_idle(self) -> bool:
        """Nothing is being answered on it."""

    def give_way(self) -> None:
        """It is cut off, at once."""


class ConnectionRoom:
    """Bounds the connections of one server, and chooses which one gives way."""

    def __init__(self, limit: int, quotas: TeamQuotas) -> None:
        self._limit = limit
        self._quotas = quotas
        self._strangers: dict[Connection, None] = {}
        """The oldest first, as are those above the limit."""
        self._above_limit: dict[Connection, None] = {}
        self._teams: dict[Connection, str] = {}
        self._of_teams: Counter[str] = Counter()

    def enter(self, connection: Connection) -> bool:
        """Somebody came; False: they are one too many, and are to be refused."""
        inside = len(self._strangers) + len(self._teams)
        if inside >= self._limit and not self._gives_way(self._strangers):
            if len(self._above_limit) >= _SPARE and not self._gives_way(self._above_limit):
                connection.give_way()
            self._above_limit[connection] = None
            return False
        self._strangers[connection] = None
        return True

    def belongs_to(self, connection: Connection, team: str) -> bool:
        """One of its requests has shown who it is; False: the team has as many as it may."""
        if self._teams.get(connection) == team or connection in self._above_limit:
            return True
        if self._quotas.left_for(team, self._limit, self._of_teams) == 0:
            return False
        self.leave(connection)
        self._teams[connection] = team
        self._of_teams[team] += 1
        return True

    def leave(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._above_limit.pop(connection, None)
        if (team := self._teams.pop(connection, None)) is not None:
            self._of_teams[team] -= 1

    def _gives_way(self, candidates: dict[Connection, None]) -> bool:
        found = next((each for each in candidates if each.is_idle), None)
        if found is None:
            return False
        self.leave(found)
        found.give_way()
        return True
