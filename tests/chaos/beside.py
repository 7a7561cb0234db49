"""What is a job that runs beside the first one of a run, with its ``read_seed`` and a seed of its own?"""

from __future__ import annotations

from tests.chaos.legs import Legs

__all__ = ["JobBeside"]


class JobBeside:
    """
    :param legs: its ranks; somebody else begins them, and stops them at the end of the run.
    """

    def __init__(self, name: str, legs: Legs, seed: int) -> None:
        self.name, self.legs, self.seed = name, legs, seed
        self.has_lost = False
        """Whether receipts of earlier epochs may lack something: pods or ranks have lost what they knew."""
        self.is_over = False
        """Whether it was ended before it was done."""
        self._is_taken = False

    @property
    def is_done(self) -> bool:
        return self.is_over or (not self._is_taken and all(process.done for process in self.legs.ranks))

    @property
    def failure(self) -> str | None:
        """Why one of its ranks ended though nobody ended it."""
        if self.is_over or self._is_taken:
            return None
        return next(filter(None, (process.failure for process in self.legs.ranks)), None)

    def take(self) -> bool:
        """Its ranks are the caller's until it gives them back. False: they are somebody else's, or gone."""
        if self.is_over or self._is_taken:
            return False
        self._is_taken = True
        return True

    def give_back(self) -> None:
        self._is_taken = False

    def kill(self) -> None:
        """All its ranks, at once."""
        self.has_lost = True
        self.legs.stop()

    def restart(self) -> None:
        """After :meth:`kill`. Where none has saved a state, they begin anew, perhaps by another plan."""
        if not self.legs.have_saved:
            for process in self.legs.ranks:
                process.forget()
        for process in self.legs.ranks:
            process.restart(process.plan.home)

    def kill_rank(self, rank: int) -> None:
        """It goes on at once from what it had written down."""
        if len(self.legs.ranks) == 1:
            self.kill()
            self.restart()
            return
        self.has_lost = True
        process = self.legs.ranks[rank]
        process.kill()
        process.restart(process.plan.home)
