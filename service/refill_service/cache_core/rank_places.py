"""Where is each rank of a job, and what can still be asked for? The one place that keeps the epoch of a rank.

A rank is in the epoch that it asked for last, and has left those before. It may ask for the epoch before once more,
when an answer was lost. No rank is served an epoch before every rank has entered the one before it. A job begins with
any epoch, and epochs may be left out, by all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

NOT_BEGUN = -1

_SAFELY_OVER = 3
"""An epoch that lies so far behind the newest has ended at all owners: a rank that asks nothing in those since can't be
served in it any more."""
LONGEST_STEP = 1000
"""Epochs from the newest to one that may be asked for."""


class RankPlaces:
    """Knows the epoch of each rank of a job, and from it what can still be asked for.

    :param asks_nothing: whether a rank has no request in an epoch, so that nobody waits for it there; None: it always
        has one.
    """

    def __init__(self, world_size: int, asks_nothing: Callable[[int, int], bool] | None = None) -> None:
        self._asks_nothing = asks_nothing
        self._epochs = [NOT_BEGUN] * world_size
        self._newest = NOT_BEGUN
        self._first = 0
        """The epoch that the job began with."""
        self._passed = [NOT_BEGUN] * world_size
        """By rank, up to which epoch it has nothing to ask after the one that it is in. Kept, as traces are not."""
        self._counts_in = [NOT_BEGUN] * world_size
        """By rank, the epoch that it is in, or a later one that it has passed by safely."""
        self._in_epoch = Counter({NOT_BEGUN: world_size})
        """How many ranks count as being in each."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """``(rank, epoch)`` of those that have begun."""
        return ((rank, epoch) for rank, epoch in enumerate(self._epochs) if epoch > NOT_BEGUN)

    def epoch(self, rank: int) -> int:
        return self._epochs[rank]

    @property
    def newest(self) -> int:
        """The latest epoch that a rank has asked for; ``NOT_BEGUN`` when none has."""
        return self._newest

    @property
    def first(self) -> int:
        """The epoch that the job began with; 0 before that."""
        return self._first

    @property
    def oldest(self) -> int:
        """The earliest epoch that a rank is in; ``NOT_BEGUN`` while one has not begun. Who asks nothing in epoch after
        epoch does not hold it back."""
        return min(self._in_epoch)

    @property
    def oldest_needed(self) -> int:
        """The first epoch that a rank can still ask for."""
        return self.oldest - 1

    @property
    def begun(self) -> bool:
        return self.newest > NOT_BEGUN

    def may_ask(self, epoch: int) -> bool:
        """Whether a rank can be as far as this epoch. Epochs may be left out, as by a validation now and then; one that
        is far beyond is a mistake, such as a count of steps, and would end the running epoch."""
        return not self.begun or epoch <= self.newest + LONGEST_STEP

    def enters(self, rank: int, epoch: int) -> bool:
        """Fact: a rank asks for this epoch. Returns whether it has left those before only now."""
        if epoch <= self._epochs[rank]:
            return False
        self._epochs[rank] = epoch
        self._count_in(rank, epoch)
        if epoch > self._newest:
            if not self.begun:
                self._first = epoch
            self._newest = epoch
            self._pass_by()
        return True

    def _pass_by(self) -> None:
        if self._asks_nothing is None:
            return
        for rank, at in enumerate(self._epochs):
            following = max(self._passed[rank] + 1, at + 1, self._first)
            while following <= self._newest and self._asks_nothing(following, rank):
                self._passed[rank] = following
                following += 1
            self._count_in(rank, min(self._passed[rank], self._newest - _SAFELY_OVER))

    def _count_in(self, rank: int, epoch: int) -> None:
        before = self._counts_in[rank]
        if epoch <= before:
            return
        self._counts_in[rank] = epoch
        self._in_epoch[epoch] += 1
        self._in_epoch[before] -= 1
        if not self._in_epoch[before]:
            del self._in_epoch[before]

    def all_entered(self, epoch: int) -> bool:
        """Whether every rank that asks for anything in this epoch has entered it."""
        return next(self._behind(epoch), None) is None

    def behind(self, epoch: int) -> list[int]:
        """The ranks that have yet to enter an epoch, and that have something to ask there: the others wait for them."""
        return list(self._behind(epoch))

    def _behind(self, epoch: int) -> Iterator[int]:
        if self.oldest >= epoch:
            return iter(())
        behind = (rank for rank, at in enumerate(self._epochs) if at < epoch)
        return behind if (nothing := self._asks_nothing) is None else (r for r in behind if not nothing(epoch, r))
