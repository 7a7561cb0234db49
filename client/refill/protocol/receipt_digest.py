"""What number says which samples came at which positions, whoever received them, in whatever order?

The sum modulo 2**128 of a hash of (plan_id, epoch, position, sample), over positions of an epoch's one order. Sums of
parts that share no position add up to that of the whole, so any workers and ranks count their own. Two runs with equal
digests of an epoch had the same samples at the same positions. It is no proof against forgers.

The hash has two halves of 64 bits, each splitmix64 applied twice (:mod:`refill.protocol.keyed_hash`), with keys of
their own for each plan and epoch. It never changes: another one would have another domain.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from refill.errors import InvalidInput
from refill.protocol.dealing import Dealing
from refill.protocol.keyed_hash import UInt64Array, key_of, numbers_at
from refill.protocol.wire_format import Int64Array

_DOMAIN = "refill receipt 1"
_MODULUS = 1 << 128
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def sample_hashes(plan_id: str, epoch: int, positions: Int64Array, samples: Int64Array) -> UInt64Array:
    """``(2, n)``: the high and the low halves of the hashes of samples ``(n,)`` at positions ``(n,)``."""
    at, ids = positions.astype(np.uint64), samples.astype(np.uint64)
    keys = (key_of(_DOMAIN, half, plan_id, epoch) for half in ("high", "low"))
    return np.stack([numbers_at(key, numbers_at(key, at) ^ ids) for key in keys])


def sum_of_hashes(hashes: UInt64Array) -> int:
    """Modulo 2**128, of ``(2, n)`` halves, ``n < 2**32``."""
    high, low = (
        (int((half >> _HALF).sum(dtype=np.uint64)) << 32) + int((half & _LOW).sum(dtype=np.uint64)) for half in hashes
    )
    return ((high << 64) + low) % _MODULUS


def shown_digest(digest: int) -> str:
    return f"{digest % _MODULUS:032x}"


class DigestPart(NamedTuple):
    """What the loop of one rank has had of an epoch, as it was dealt to the ranks then. A position that repeats another
    one, to fill the last step up, adds nothing."""

    num_ranks: int
    batch: int
    start: int
    drop_last: bool
    rank: int
    spans: tuple[tuple[int, int], ...]
    """Of its own positions, ``[first, end)`` each, ascending."""
    digest: int

    @property
    def dealt(self) -> tuple[int, int, int, bool, int]:
        return self[:5]

    @property
    def num_places(self) -> int:
        return sum(end - first for first, end in self.spans)

    def dealing(self, num_positions: int) -> Dealing:
        return Dealing(num_positions, self.num_ranks, self.batch, self.start, self.drop_last)

    def to_list(self) -> list[Any]:
        """Plain values, for states and messages."""
        return [*self.dealt, [list(span) for span in self.spans], shown_digest(self.digest)]

    @classmethod
    def from_list(cls, said: Any) -> DigestPart:
        """Raises :class:`InvalidInput` for what is none."""
        try:
            num_ranks, batch, start, drop_last, rank, spans, digest = said
            spans = tuple((int(first), int(end)) for first, end in spans)
            found = cls(int(num_ranks), int(batch), int(start), bool(drop_last), int(rank), spans, int(digest, 16))
        except (OverflowError, TypeError, ValueError) as error:
            raise InvalidInput(f"this is no part of a digest: {said!r:.100}") from error
        numbers = (found.batch, found.num_ranks, *(place for span in spans for place in span))
        ascending = [place for span in spans for place in span]
        if (
            not 0 <= found.rank < found.num_ranks
            or not 0 <= found.digest < _MODULUS
            or min(found.batch, found.num_ranks) < 1
            or found.start < 0
            or max(numbers, default=0) >= 1 << 62
            or min(ascending, default=0) < 0
            or any(first >= end for first, end in spans)
            or ascending != sorted(ascending)
        ):
            raise InvalidInput(f"this is no part of a digest: {said!r:.100}")
        return found


def merged_parts(parts: Sequence[DigestPart], most_of_rank: int = 1 << 30) -> list[DigestPart]:
    """Those that say most: what a part covers is left out. Of two that share some positions, the larger one stays; both
    do that contradict each other, as of members of a group that shares batches.

    :param most_of_rank: of one rank and dealing, no more than so many.
    """
    kept: dict[tuple[int, int, int, bool, int], list[DigestPart]] = {}
    for part in sorted(set(parts), key=lambda part: (-part.num_places, *part)):
        of_rank = kept.setdefault(part.dealt, [])
        if len(of_rank) < most_of_rank and all(part.spans == other.spans for other in of_rank if _meet(part, other)):
            of_rank.append(part)
    return [part for of_rank in kept.values() for part in of_rank]


def _meet(one: DigestPart, other: DigestPart) -> bool:
    few, many = sorted((one.spans, other.spans), key=len)
    for first, end in few:
        after = bisect_left(many, (first,))
        if (after < len(many) and many[after][0] < end) or (after > 0 and many[after - 1][1] > first):
            return True
    return False
