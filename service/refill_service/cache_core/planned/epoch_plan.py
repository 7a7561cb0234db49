"""Which sample is at each position of an epoch? A function of the plan's settings and the dataset.

A position is of a place in a share (``refill/protocol/weaving.py``), and the share's order says which sample that is
(``share_order.py``). A share is planned when it is first asked for. Where a job is not shuffled, position p is sample
p, and each share comes in the order of the dataset.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from refill.protocol.plan_settings import PlanSettings
from refill.protocol.weaving import Weaving, epoch_key, read_key, weaving_of
from refill_service.cache_core.planned.share_order import ShareOrder, order_share, stored_order
from refill_service.cache_core.planned.shares import Share, Shares
from refill_service.cache_core.sample_mapping import Int64Array


class StoredPlaces:
    """What :class:`~refill.protocol.weaving.Weaving` is of a shuffled epoch, of one in the order of the dataset."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self.num_positions = int(shares.sizes.sum())

    def places(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        return self._shares.places(positions)

    def positions(self, share: int, places: Int64Array) -> Int64Array:
        return self._shares.samples(share, places)


class EpochPlan:
    """The order of one epoch of a plan: which sample is at each position, share by share.

    :param shares: of the dataset, for the settings' chunk size and number of shares.
    :param lengths_of: bytes of samples of the dataset, ``(n,) -> (n,)``.
    :param ramped: the epoch is the job's first, and memory fills up while it runs.
    """

    def __init__(
        self,
        settings: PlanSettings,
        shares: Shares,
        lengths_of: Callable[[Int64Array], Int64Array],
        epoch: int,
        *,
        ramped: bool,
    ) -> None:
        self.settings, self.shares = settings, shares
        self._lengths_of = lengths_of
        self._ramped = ramped
        self._key, self._read_key = epoch_key(settings, epoch), read_key(settings, epoch)
        self.weaving: Weaving | StoredPlaces
        if settings.keeps_stored_order:
            self.weaving = StoredPlaces(shares)
        else:
            self.weaving = weaving_of(settings, shares.sizes, epoch)
        self._orders: dict[int, tuple[Share, ShareOrder]] = {}

    @property
    def num_positions(self) -> int:
        return self.weaving.num_positions

    def of_share(self, number: int) -> tuple[Share, ShareOrder]:
        """A share and its order, planned once. It takes some 0.3 s for a million samples."""
        if number not in self._orders:
            share = self.shares.share(number)
            memory_bytes = self.settings.memory_bytes * len(share.samples) // max(1, self.num_positions)
            lengths = self._lengths_of(share.samples)
            self._orders[number] = share, self._order(number, share, lengths, memory_bytes)
        return self._orders[number]

    def _order(self, number: int, share: Share, lengths: Int64Array, memory_bytes: int) -> ShareOrder:
        if self.settings.keeps_stored_order:
            return stored_order(share.starts, lengths, memory_bytes)
        return order_share(
            share.starts,
            lengths,
            memory_bytes,
            self._key,
            number=number,
            num_shares=self.shares.num_shares,
            run=self.settings.run,
            ramped=self._ramped,
            read_key=self._read_key,
        )

    def samples(self, positions: Int64Array) -> Int64Array:
        """The sample at each position ``0 <= position < num_positions``, ``(n,)``. Plans the shares that it takes."""
        shares, places = self.weaving.places(positions)
        found = np.empty(len(positions), dtype=np.int64)
        for number in np.unique(shares).tolist():
            share, order = self.of_share(number)
            here = np.flatnonzero(shares == number)
            found[here] = share.samples[order.samples[places[here]]]
        return found

    def whole(self) -> Int64Array:
        """The sample at every position, ``(num_positions,)``. Plans all shares."""
        found = np.empty(self.num_positions, dtype=np.int64)
        for number in range(self.shares.num_shares):
            share, order = self.of_share(number)
            places = np.arange(len(share.samples), dtype=np.int64)
            found[self.weaving.positions(number, places)] = share.samples[order.samples]
        return found
