"""How much of something that is bounded may each job, and each team, hold? So that who is greedy shuts out nobody else.

A *team* is who a token belongs to, a *job* what the bytes are held for. Either may hold more only while it holds no
more than a multiple of what is left free (Choudhury and Hahne, *Dynamic Queue Length Thresholds for Shared-Memory
Packet Switches*, 1998): whatever one of them does, the next one finds room, though nobody lets go of anything.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from refill.protocol.job_spec import JobSpec

_JOB_PER_FREE = 1
"""A job alone gets half of the room."""
_TEAM_PER_FREE = 2
"""A team alone, with however many jobs, two thirds."""


class Asker(NamedTuple):
    """Whom bytes are charged to."""

    team: str = ""
    """Empty where there are no tokens: then everybody is nobody's team, and only jobs are told apart."""
    job: str = ""

    @classmethod
    def of(cls, spec: JobSpec) -> Asker:
        return cls(spec.holder, spec.name)


NOBODY = Asker()


class SharedRoom:
    """Counts the bytes that askers hold of a number of bytes, and says whether more fit; whoever asks refuses.

    :param one_may_be_larger: what is alone in the room may have any size. For those who are trusted.
    """

    def __init__(self, limit_bytes: int, *, one_may_be_larger: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._one_may_be_larger = one_may_be_larger
        self._of_jobs: Counter[Asker] = Counter()
        self._of_teams: Counter[str] = Counter()

    def held_by(self, asker: Asker) -> int:
        return self._of_jobs[asker]

    def fits(self, asker: Asker, more_bytes: int, *, has_bytes: int = 0) -> bool:
        """Whether the asker may hold so much more.

        :param has_bytes: of what it holds, the part that belongs to the same thing.
        """
        if self._one_may_be_larger and has_bytes == self.used_bytes:
            return True
        free_bytes = self.limit_bytes - self.used_bytes - more_bytes
        if free_bytes < 0 or self._of_jobs[asker] + more_bytes > _JOB_PER_FREE * free_bytes:
            return False
        return not asker.team or self._of_teams[asker.team] + more_bytes <= _TEAM_PER_FREE * free_bytes

    def hold(self, asker: Asker, more_bytes: int) -> None:
        """Fact: the asker holds so much more, or less."""
        self.used_bytes += more_bytes
        self._of_jobs[asker] += more_bytes
        if self._of_jobs[asker] == 0:
            del self._of_jobs[asker]
        self._of_teams[asker.team] += more_bytes
        if self._of_teams[asker.team] == 0:
            del self._of_teams[asker.team]
