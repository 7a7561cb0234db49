"""Do all ranks that live go through an epoch by one dealing? Else some samples would come twice, and some never.

Ranks that go on with another number of ranks deal what is left anew, from where their states say that all of them were.
States of different steps say different places. Where that is so, the dealing that began last stands: those that it
takes the place of may be processes that have been forgotten. Ranks that still ask by an earlier one are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from refill.protocol.dealing import Dealing

__all__ = ["LIVES_SECONDS", "RankDealings"]

LIVES_SECONDS = 10.0
"""A rank that has asked for nothing for so long may be gone."""
_KEPT_EPOCHS = 3


@dataclass(frozen=True)
class _Asked:
    epoch: int
    dealing: Dealing
    at: float


class RankDealings:
    """Of one planned job at one pod. ``now`` is in seconds, and never goes back."""

    def __init__(self) -> None:
        self._asked: dict[int, _Asked] = {}
        """By rank, what it asked for last."""
        self._began: dict[int, dict[Dealing, float]] = {}
        """By epoch, when somebody asked by each dealing for the first time."""

    def asks(self, rank: int, epoch: int, dealing: Dealing, now: float) -> tuple[int, Dealing] | None:
        """Fact: a rank asks for samples of an epoch. Returns another one that lives, and goes through it by a later
        dealing; then nothing has been asked. None: there is none."""
        if epoch not in self._began:
            self._began[epoch] = {}
            for old in list(self._began)[:-_KEPT_EPOCHS]:
                del self._began[old]
        began = self._began[epoch].setdefault(dealing, now)
        if len(self._began[epoch]) > 1:
            for other, asked in list(self._asked.items()):
                if now - asked.at > LIVES_SECONDS:
                    del self._asked[other]
                elif other != rank and asked.epoch == epoch and self._began[epoch].get(asked.dealing, began) > began:
                    return other, asked.dealing
        self._asked[rank] = _Asked(epoch, dealing, now)
        return None
