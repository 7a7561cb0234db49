"""Which positions of an epoch's one global order does each rank ask for?

In step t the ranks together take the next ``ranks * batch`` positions, and rank r the r-th ``batch`` of them. So the
samples of a global step are the same for any number of ranks whose global batch is the same, and the place of a whole
job is one integer, the first position that no step has taken: what is left is dealt anew from there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refill.errors import InvalidInput

Int64Array = NDArray[np.int64]

MOST_LISTED = 1 << 36
"""Places of a rank's own list, at most."""


@dataclass(frozen=True)
class Dealing:
    """The positions ``start <= position < num_positions`` of an epoch, dealt to ``num_ranks`` ranks.

    Every rank gets equally many, as torch's DistributedSampler counts: where the ranks do not divide what is left, the
    first positions of the epoch are repeated (``position % num_positions``), or with ``drop_last`` the last ones are
    left out. The last step is dealt evenly, so every rank has equally many batches, too.

    Raises :class:`InvalidInput` for a start that is not in the epoch.
    """

    num_positions: int
    num_ranks: int = 1
    batch: int = 1
    """Positions of one rank in one step. With 1, rank r gets every ``num_ranks``-th position, and steps of any
    batch size are steps of the global order."""
    start: int = 0
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name, least in (("num_positions", 0), ("num_ranks", 1), ("batch", 1), ("start", 0)):
            if getattr(self, name) < least:
                raise InvalidInput(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.start > self.num_positions:
            raise InvalidInput(f"an epoch of {self.num_positions} positions can't go on from position {self.start}")

    @classmethod
    def of_lists(cls, num_ranks: int) -> Dealing:
        """Ranks have lists of their own, which may differ in length: as many places each as any list has."""
        return cls(num_ranks * MOST_LISTED, num_ranks)

    @property
    def per_rank(self) -> int:
        """Positions of each rank, repeated ones included."""
        left = self.num_positions - self.start
        return left // self.num_ranks if self.drop_last else -(-left // self.num_ranks)

    @property
    def _in_whole_steps(self) -> int:
        return self.per_rank // self.batch * self.batch

    def positions(self, rank: int, places: Int64Array) -> Int64Array:
        """The global position of each of a rank's places ``0 <= place < per_rank``. At and past ``num_positions`` it is
        a repeat of position ``position % num_positions``."""
        whole, step = self._in_whole_steps, self.num_ranks * self.batch
        turn = int(places[0]) // self.batch if len(places) else 0
        if (places >= turn * self.batch).all() and (places < min(whole, (turn + 1) * self.batch)).all():
            return places + (turn * (step - self.batch) + rank * self.batch + self.start)  # of one step, as a batch is
        turns, within = np.divmod(places, self.batch)
        found = turns * step + rank * self.batch + within
        rest = self.per_rank - whole
        last = whole * self.num_ranks + rank * rest + (places - whole)
        return np.where(places < whole, found, last) + self.start

    def places(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """``(ranks, places)`` of global positions from ``start`` on: the inverse of :meth:`positions`. A position that
        was dropped has a place at or past ``per_rank``."""
        whole, step = self._in_whole_steps, self.num_ranks * self.batch
        ahead = positions - self.start
        turns, within = np.divmod(ahead, step)
        ranks, in_batch = np.divmod(within, self.batch)
        rest = max(1, self.per_rank - whole)
        last_ranks, last = np.divmod(ahead - whole * self.num_ranks, rest)
        in_last = ahead >= whole * self.num_ranks
        dropped = in_last & (ahead >= self.per_rank * self.num_ranks)
        found = np.where(in_last, whole + last, turns * self.batch + in_batch)
        return np.where(in_last, np.minimum(last_ranks, self.num_ranks - 1), ranks), np.where(
            dropped, np.maximum(found, self.per_rank), found
        )

    def places_of_rank(self, rank: int, positions: Int64Array) -> Int64Array:
        """``(m,)`` of those of ``(n,)`` global positions, at least one, that are dealt to a rank: its places."""
        first, last = int(positions.min()) - self.start, int(positions.max()) - self.start
        step = self.num_ranks * self.batch
        turn = first // step
        begins = turn * step + rank * self.batch
        if 0 <= begins <= first and last < min(begins + self.batch, self._in_whole_steps * self.num_ranks):
            return positions - (self.start + begins - turn * self.batch)  # of one step, as a batch is
        of_ranks, places = self.places(positions)
        own: Int64Array = places[(of_ranks == rank) & (positions >= self.start)]
        return own
