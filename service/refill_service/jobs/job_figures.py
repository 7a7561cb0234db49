"""What do metrics, and who watches, hear of a job at one pod? Counts of its epochs and of its clients.

The last few hundred epochs are kept apart, all before in sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from refill_service.cache_core.home_machine import HomeCounts
from refill_service.cache_core.policies.interface import EpochCounts
from refill_service.jobs.running_epoch import OwnerCounts

RECEIPT_OUTCOMES = ("delivered", "duplicates", "missing")
MOST_CLIENTS = 1024
"""Ranks of a job that are counted one by one at a pod: those of the largest training runs on a few pods."""
_KEPT_EPOCHS = 300
_EARLIER = -1
"""In place of an epoch's number: of all that are kept in sum only."""

Counts = TypeVar("Counts", OwnerCounts, HomeCounts, EpochCounts)


@dataclass
class ClientCounts:
    """What clients of one rank reported."""

    data_wait_seconds: float = 0.0
    samples: int = 0
    bytes: int = 0


class Clients:
    """What the clients of one job have reported to this pod, by rank."""

    def __init__(self) -> None:
        self.of_rank: dict[int, ClientCounts] = {}
        self.others = ClientCounts()
        """Of ranks beyond ``MOST_CLIENTS``, all together: a job may say that it has a million, and each is three
        series."""

    def client(self, rank: int) -> ClientCounts:
        if rank not in self.of_rank and len(self.of_rank) >= MOST_CLIENTS:
            return self.others
        return self.of_rank.setdefault(rank, ClientCounts())


@dataclass(frozen=True)
class JobFigures:
    """What the metrics of one job at a pod are made of."""

    policy: str
    """What runs."""
    epoch: int | None
    """That the job is in; None: none has begun here."""
    owners: Mapping[int, OwnerCounts]
    """By epoch."""
    homes: Collection[HomeCounts]
    """Of all epochs."""
    clients: Clients
    share_bytes: int
    """Of the samples that the pod owns."""
    memory_bytes: int
    """Given to the job here."""
    resident_bytes: int
    remote_bytes: int
    recent_bytes: int
    sent_bytes: Mapping[int, int]
    """To other pods."""
    ranks_alive: int = 0
    """Of those that asked here."""
    progress: tuple[int, int] | None = None
    """Requests of the epoch for the pod's share, ``(answered, all)``."""
    receipts: Mapping[str, int] | None = None
    """By ``RECEIPT_OUTCOMES``; None: receipts of the job say something else."""
    damaged: int = 0
    waiting: Mapping[int, int] = field(default_factory=dict)
    """Requests that wait for another pod, by pod."""
    received: Mapping[int, int] = field(default_factory=dict)
    """By rank, samples of the newest epoch that it says it has received; of planned jobs."""
    oldest_take_seconds: float | None = None
    """For how long what was asked of this pod's samples has been waited for; None: that is not known of the job."""


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


def sum_of_counts(counts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    pods = sorted(counts, key=lambda counts: int(counts["pod"]))
    total: dict[str, Any] = {}
    for each in pods:
        for name, value in each.items():
            if name not in ("pod", "epoch"):
                total[name] = total.get(name, 0) + value
    return {"pods": pods, "total": total}


def counts_of(pod: int, epoch: int, owner: OwnerCounts | None, home: HomeCounts | None) -> dict[str, Any]:
    """None: nothing happened."""
    owner, home = owner or OwnerCounts(EpochCounts()), home or HomeCounts()
    owned = asdict(owner)
    core = owned.pop("core")
    counts: dict[str, Any] = {"pod": pod, "epoch": epoch}
    counts |= core | {"bytes_wasted": owner.core.bytes_wasted} | owned | asdict(home)
    return counts
