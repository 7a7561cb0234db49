"""How much may one team take of a pod, so that something is left for the others? Where there is one team, all of it.

What is shared (memory of jobs, connections) is kept for teams in equal parts up to ``reserved_fraction``: a team always
gets its part, takes more while there is more than what is kept for others, and can't be pushed below it by anybody.
Jobs and requests have a number for each team.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from refill.errors import NotAllowed, PodBusy

__all__ = ["TeamQuotas"]


@dataclass
class _Allowance:
    """Of requests: it fills up with time, to what comes in a second, and each request takes one."""

    requests: float
    filled_at: float


class TeamQuotas:
    """Of one pod.

    :param teams: those who have a token now.
    :param reserved_fraction: see above.
    :param most_jobs: of one team.
    :param requests_per_second: of one team.
    """

    def __init__(
        self,
        teams: Callable[[], Collection[str]],
        reserved_fraction: float,
        most_jobs: int,
        requests_per_second: float,
    ) -> None:
        self._teams = teams
        self._reserved_fraction = reserved_fraction
        self._most_jobs = most_jobs
        self._requests_per_second = requests_per_second
        self._allowances: dict[str, _Allowance] = {}

    @property
    def there_are_several(self) -> bool:
        return len(self._teams()) > 1

    def reserved(self, total: int) -> dict[str, int]:
        """By team, what of ``total`` is kept for it; empty where there is one."""
        teams = self._teams()
        if len(teams) < 2:
            return {}
        return dict.fromkeys(teams, int(total * self._reserved_fraction) // len(teams))

    def left_for(self, team: str, total: int, used: Mapping[str, int]) -> int:
        """How much more of ``total`` a team may take; never more than is free, and at least 0.

        :param used: by each team, by its name.
        """
        free = total - sum(used.values())
        teams = self._teams()
        if len(teams) > 1:
            part = int(total * self._reserved_fraction) // len(teams)
            free -= sum(max(0, part - used.get(other, 0)) for other in teams if other != team)
        return max(0, free)

    def check_jobs(self, team: str, num_jobs: int) -> None:
        """Raises :class:`NotAllowed` when a team that has so many jobs may have no more."""
        if num_jobs >= self._most_jobs and self.there_are_several:
            raise NotAllowed(
                f"you have {num_jobs} jobs at this pod, as many as one team may (team_max_jobs): end those that you "
                "need no more"
            )

    def check_request(self, team: str, now: float) -> None:
        """Fact: a team asks for something. Raises :class:`PodBusy` when it has asked too often in the last second."""
        if not self.there_are_several:
            return
        most = max(1.0, self._requests_per_second)
        allowance = self._allowances.setdefault(team, _Allowance(most, now))
        allowance.requests = min(most, allowance.requests + (now - allowance.filled_at) * self._requests_per_second)
        allowance.filled_at = now
        if allowance.requests < 1:
            raise PodBusy(
                f"you ask this pod more than {self._requests_per_second:g} times a second, as often as one team may "
                "(team_requests_per_second)"
            )
        allowance.requests -= 1
