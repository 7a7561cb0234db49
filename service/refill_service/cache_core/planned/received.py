"""Which positions of an epoch have ranks asked for, and which do they say that they have received?

Nothing is answered by this: it is for receipts, and to tell a loop that leaves positions out. Positions here are those
of a rank, as an epoch, or what is left of it, is dealt (:mod:`refill.protocol.dealing`). An epoch that is dealt anew
was had up to where the new dealing starts, as the checkpoint says that it goes on from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from refill.errors import InvalidInput
from refill.protocol.dealing import Dealing
from refill.protocol.position_set import PositionSet
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["EpochReceived", "ReceivedEpochs", "receipt_of"]

_KEPT_EPOCHS = 300
_KEPT_WHOLE = 3
_MOST_SPANS = 1 << 16
"""Of one rank and epoch: a loader's workers leave a span for each batch that is under way, or was left out."""
_MOST_RANKS = 1 << 20


@dataclass
class EpochReceived:
    """Of one epoch, by rank."""

    dealing: Dealing
    since: float
    """When somebody has asked by this dealing for the first time, by the clock."""
    asked: dict[int, PositionSet] = field(default_factory=dict)
    largest_batch: int = 0
    """Positions that were asked for at once."""
    received: dict[int, PositionSet] = field(default_factory=dict)
    damaged: dict[int, dict[int, int]] = field(default_factory=dict)
    """Samples that ranks went on without, by their positions."""

    def to_dict(self) -> dict[str, Any]:
        dealing = self.dealing
        return {
            "dealing": [dealing.num_positions, dealing.num_ranks, dealing.batch, dealing.start, dealing.drop_last],
            "since": self.since,
            "received": {rank: list(found) for rank, found in self.received.items()},
            "damaged": {rank: list(found.items()) for rank, found in self.damaged.items()},
        }


class ReceivedEpochs:
    """Of one planned job at one pod."""

    def __init__(self) -> None:
        self.num_damaged = 0
        """Samples that ranks went on without, of all epochs."""
        self._epochs: dict[int, EpochReceived] = {}

    def of(self, epoch: int) -> EpochReceived | None:
        return self._epochs.get(epoch)

    @property
    def epochs(self) -> list[int]:
        """Those known, ascending."""
        return sorted(self._epochs)

    @property
    def newest(self) -> int:
        """-1: none."""
        return max(self._epochs, default=-1)

    def at(self, epoch: int, dealing: Dealing, now: float) -> EpochReceived:
        """What is known of an epoch that is dealt so. Here and below, ``now`` is the time by the clock."""
        found = self._epochs.get(epoch)
        if found is None or found.dealing != dealing:
            found = self._epochs[epoch] = EpochReceived(dealing, now)
            kept = sorted(self._epochs)
            for old in kept[:-_KEPT_EPOCHS]:
                del self._epochs[old]
            for old in kept[:-_KEPT_WHOLE]:
                if old in self._epochs:
                    self._epochs[old].asked.clear()
        return found

    def comes_to(self, epoch: int, rank: int) -> bool:
        """Whether a rank that has asked for the epoch before asks for this one for the first time."""
        before, now = self._epochs.get(epoch - 1), self._epochs.get(epoch)
        return before is not None and rank in before.asked and (now is None or rank not in now.asked)

    def asks(self, epoch: int, dealing: Dealing, rank: int, positions: Int64Array, had: int = 0, *, now: float) -> None:
        """Fact: a rank asks for ``(n,)`` of its positions; those below ``had`` lie in a checkpoint that it goes on
        from."""
        found = self.at(epoch, dealing, now)
        found.largest_batch = max(found.largest_batch, len(positions))
        asked = found.asked.setdefault(rank, PositionSet())
        asked.add(0, had)
        if len(asked) < _MOST_SPANS:
            asked.add_all(positions)

    def received(
        self, epoch: int, dealing: Dealing, rank: int, spans: Iterable[tuple[int, int]], *, now: float
    ) -> None:
        """Fact: a rank has received these of its positions, ``[first, end)`` each."""
        spans = list(spans)
        for first, end in spans:
            if not 0 <= first <= end <= dealing.per_rank:
                raise InvalidInput(f"rank {rank} has {dealing.per_rank} positions in epoch {epoch}, got {first}-{end}")
        known = self.at(epoch, dealing, now).received.setdefault(rank, PositionSet())
        for first, end in spans:
            if len(known) < _MOST_SPANS:
                known.add(first, end)

    def goes_without(
        self, epoch: int, dealing: Dealing, rank: int, positions: Int64Array, samples: Int64Array, *, now: float
    ) -> None:
        """Fact: a rank goes on without damaged samples."""
        for position in positions.tolist():
            if not 0 <= position < dealing.per_rank:
                raise InvalidInput(f"rank {rank} has {dealing.per_rank} positions in epoch {epoch}, got {position}")
        found = self.at(epoch, dealing, now).damaged.setdefault(rank, {})
        self.num_damaged -= len(found)
        found.update(zip(positions.tolist(), samples.tolist(), strict=True))
        self.num_damaged += len(found)


def receipt_of(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What is known of an epoch that pods have these parts of (:meth:`EpochReceived.to_dict`), at least one.

    Only of how it was dealt last: what other dealings had before lies in a checkpoint that this one goes on from.
    """
    parts = list(parts)
    newest = max(parts, key=lambda part: float(part["since"]))["dealing"]
    num_positions, num_ranks, batch, start, drop_last = newest
    dealing = Dealing(num_positions, num_ranks, batch, start, bool(drop_last))
    ranks: dict[int, PositionSet] = {}
    damaged: dict[int, dict[int, int]] = {}
    for part in parts:
        if part["dealing"] != newest:
            continue
        for rank, spans in part["received"].items():
            known = ranks.setdefault(int(rank), PositionSet())
            for first, end in spans:
                known.add(first, end)
        for rank, named in part["damaged"].items():
            damaged.setdefault(int(rank), {}).update((position, sample) for position, sample in named)
    of_ranks = {rank: ranks[rank].count for rank in sorted(ranks)}
    dealt = dealing.per_rank * num_ranks
    planned = min(num_positions, start + dealt)
    repeats = (
        sum(_num_received(ranks.get(rank), dealing, rank) for rank in range(num_ranks))
        if start + dealt > num_positions
        else 0
    )
    received = start + sum(of_ranks.values()) - repeats
    return {
        "planned": planned,
        "received": received,
        "unconfirmed": planned - received,
        "dropped": num_positions - planned,
        "repeats": repeats,
        "exact": received == planned,
        "from_checkpoint": start,
        "ranks": of_ranks,
        "world_size": num_ranks,
        "damaged": sum(map(len, damaged.values())),
        "damaged_samples": sorted({sample for named in damaged.values() for sample in named.values()})[:100],
    }


def _num_received(known: PositionSet | None, dealing: Dealing, rank: int) -> int:
    """Of the positions that repeat some, to fill the last step up."""
    if known is None:
        return 0
    last = np.arange(max(0, dealing.per_rank - dealing.batch), dealing.per_rank, dtype=np.int64)
    past = last[dealing.positions(rank, last) >= dealing.num_positions].tolist()
    return sum(known.has_any(position, position + 1) for position in past)
