"""Which samples did a home pod's ranks go on without, since they are damaged? Counted, and named up to a bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["MOST_EPOCHS", "MOST_NAMED", "DamagedSamples"]

MOST_NAMED = 1000
"""Of an epoch, at one pod. A sample beyond counts each time that it is reported."""
MOST_EPOCHS = 8
"""More can't be asked for at once; ranks say which they are in."""


class DamagedSamples:
    """Counts, for each epoch of one job, the damaged samples that ranks went on without, and names the first of
    them."""

    def __init__(self) -> None:
        self._named: dict[int, dict[int, int]] = {}
        """By epoch, ranks by sample."""
        self._unnamed: dict[int, Counter[int]] = {}
        """By epoch, how many more each rank had."""
        self.total = 0

    def rank_goes_without(self, epoch: int, rank: int, samples: Iterable[int]) -> None:
        """Fact: a rank went on without these. It may report them again."""
        named = self._named.setdefault(epoch, {})
        while len(self._named) > MOST_EPOCHS:
            self.forget(min(self._named))
        for sample in samples:
            if sample in named:
                continue
            self.total += 1
            if len(named) < MOST_NAMED:
                named[sample] = rank
            else:
                self._unnamed.setdefault(epoch, Counter())[rank] += 1

    def by_rank(self, epoch: int) -> dict[int, int]:
        return dict(Counter(self._named.get(epoch, {}).values()) + self._unnamed.get(epoch, Counter()))

    def named(self, epoch: int) -> list[int]:
        return sorted(self._named.get(epoch, ()))

    def forget(self, epoch: int) -> None:
        """Fact: its receipt is written."""
        self._named.pop(epoch, None)
        self._unnamed.pop(epoch, None)
