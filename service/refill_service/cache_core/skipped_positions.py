"""Which positions of an epoch has a rank left out? Who asks for a part of its trace only is being divided twice.

What a rank asks of an epoch is a prefix of its trace, or all of it. Loader workers ask out of order, and a loop that is
broken off leaves the batches that were in flight: so a gap counts when enough was asked for above it. Only what a rank
has asked of this pod from the start of an epoch on is judged: a pod that came to be the home in the middle of one does
not know what was asked before.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["JudgedEpochs", "skipped_for_good"]

_IN_FLIGHT_BATCHES = 512
"""More than the batches that loaders have in flight for one rank: 32 workers with 16 batches each. What loses less is
noticed by the client, who knows its workers."""


class Asked(Protocol):
    """What was asked for of an epoch."""

    @property
    def end(self) -> int: ...

    def first_gap(self) -> tuple[int, int] | None: ...


def skipped_for_good(asked: Asked, largest_batch: int) -> tuple[int, int] | None:
    """The first ``(start, end)`` that was left out of an epoch which the rank has left; None: nothing was, for sure."""
    gap = asked.first_gap()
    return gap if gap is not None and gap[1] + _IN_FLIGHT_BATCHES * largest_batch <= asked.end else None


class JudgedEpochs:
    """Epochs of which a home pod has seen all requests of a rank."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        """By rank, the first epoch that is judged."""

    def comes(self, rank: int, epoch: int) -> None:
        """Fact: a rank asks for an epoch here."""
        self._first.setdefault(rank, epoch)

    def left(self, rank: int, epoch: int) -> None:
        """Fact: a rank asks for an epoch by way of another home."""
        self._first[rank] = max(epoch + 1, self._first.get(rank, 0))

    def __call__(self, rank: int, epoch: int) -> bool:
        return rank in self._first and epoch >= self._first[rank]
