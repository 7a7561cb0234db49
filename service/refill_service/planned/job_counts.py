"""What did a planned job cost at one pod, by epoch? The last few hundred epochs are kept apart, all before in sum."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

from refill_service.cache_core.home_machine import HomeCounts
from refill_service.cache_core.policies.interface import EpochCounts
from refill_service.jobs.running_epoch import OwnerCounts

__all__ = ["JobCounts"]

_KEPT_EPOCHS = 300
_EARLIER = -1
"""In place of an epoch's number: of all that are kept in sum only."""

Counts = TypeVar("Counts", OwnerCounts, HomeCounts, EpochCounts)


class JobCounts:
    """No count ever falls, whatever epochs are asked for."""

    def __init__(self) -> None:
        self.owners: dict[int, OwnerCounts] = {}
        """Of the pod as one that reads, by epoch."""
        self.homes: dict[int, HomeCounts] = {}
        """Of the pod as one that is asked by ranks, by epoch."""

    def owner(self, epoch: int) -> OwnerCounts:
        if epoch not in self.owners:
            self.owners[epoch] = OwnerCounts(EpochCounts())
            if len(self.owners) > _KEPT_EPOCHS:
                oldest = _taken(self.owners)
                before = self.owners.get(_EARLIER, OwnerCounts(EpochCounts()))
                self.owners[_EARLIER] = replace(_sum(before, oldest, "core"), core=_sum(before.core, oldest.core))
        return self.owners[epoch]

    def home(self, epoch: int) -> HomeCounts:
        if epoch not in self.homes:
            self.homes[epoch] = HomeCounts()
            if len(self.homes) > _KEPT_EPOCHS:
                oldest = _taken(self.homes)
                self.homes[_EARLIER] = _sum(self.homes.get(_EARLIER, HomeCounts()), oldest)
        return self.homes[epoch]


def _taken(counts: dict[int, Counts]) -> Counts:
    """Of the epoch that was begun first."""
    return counts.pop(next(epoch for epoch in counts if epoch != _EARLIER))


def _sum(one: Counts, other: Counts, *without: str) -> Counts:
    names = [field.name for field in fields(one) if field.name not in without]
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in names})
