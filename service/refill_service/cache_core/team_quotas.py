"""How much may one team take of a pod, so that something is left for the others? Where there is one team, all of it.

What is shared (memory of jobs, connections) is kept for teams in equal parts up to ``reserved_fraction``: a team always
gets its part, takes more while there is more than what is kept for others, and can't be pushed below it by anybody.
Jobs have a number for each team.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from refill.errors import NotAllowed


class TeamQuotas:
    """Says how much of one pod each team is sure of, and what is left for the others.

    :param teams: those who have a token now.
    :param reserved_fraction: see above.
    :param most_jobs: of one team.
    """

    def __init__(
        self,
        teams: Callable[[], Collection[str]],
        reserved_fraction: float,
        most_jobs: int,
    ) -> None:
        self._teams = teams
        self._reserved_fraction = reserved_fraction
        self._most_jobs = most_jobs

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
                f"you have {num_jobs} jobs at this pod, as many as one team may (team_max_jobs): end those that you no "
                "longer need"
            )
