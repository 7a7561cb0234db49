"""The plan of a job, as pods carry it out: which place of which share is a position, and the order of each share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from refill.protocol.plan_settings import PlanSettings
from refill.protocol.weaving import Weaving
from refill.protocol.wire_format import BatchRequest
from refill_service.cache_core.planned.epoch_plan import EpochPlan, StoredPlaces
from refill_service.cache_core.planned.shares import Share, Shares
from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array

_KEPT_WEAVINGS = 4


class JobOrders:
    """Computes the orders of a planned job's shares, and keeps the newest. Several threads may ask it.

    :param shares: of the dataset, for the settings' chunk size and number of shares.
    :param lengths_of: bytes of samples of one share of the dataset, ``(n,) -> (n,)``.
    """

    def __init__(
        self,
        settings: PlanSettings,
        layout: ChunkLayout,
        lengths_of: Callable[[Int64Array], Int64Array],
        shares: Shares | None = None,
    ) -> None:
        self.settings = settings
        self._layout = layout
        self.shares = Shares(layout, settings.num_shares) if shares is None else shares
        self._lengths_of = lengths_of
        self._weavings: OrderedDict[int, Weaving | StoredPlaces] = OrderedDict()

    def places(self, epoch: int, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """``(shares, places)`` of positions of an epoch, each ``(n,)``. Asked by one thread alone."""
        weaving = self._weavings.get(epoch)
        if weaving is None:
            weaving = self._weavings[epoch] = self._epoch(epoch).weaving
            while len(self._weavings) > _KEPT_WEAVINGS:
                self._weavings.popitem(last=False)
        return weaving.places(positions)

    def places_of(self, wanted: BatchRequest) -> tuple[Int64Array, Int64Array]:
        """The same of a request. Of what is listed, positions are the places: others may be listed."""
        if wanted.sample_ids is None:
            return self.places(wanted.epoch, wanted.positions)
        return self.shares_of(wanted.sample_ids), wanted.positions

    def first_place(self, epoch: int, number: int, position: int) -> int:
        """Of a share: the first whose position is not before this one; the number of its samples, where there is none.
        Asked by one thread alone."""
        self.places(epoch, np.zeros(1, dtype=np.int64))
        weaving = self._weavings[epoch]
        low, high = 0, int(self.shares.sizes[number])
        while low < high:
            middle = (low + high) // 2
            if weaving.positions(number, np.array([middle], dtype=np.int64))[0] < position:
                low = middle + 1
            else:
                high = middle
        return low

    def share(self, number: int) -> tuple[Share, Int64Array]:
        """A share, and the bytes of each of its samples."""
        share = self.shares.share(number)
        return share, self._lengths_of(share.samples)

    def shares_of(self, samples: Int64Array) -> Int64Array:
        """The share of each sample of the dataset, ``(n,)``."""
        return self.chunks_and_shares(samples)[1]

    def chunks_and_shares(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The chunk of each sample of the dataset, and its share, each ``(n,)``."""
        chunks = self._layout.locate(samples)[0]
        return chunks, self.shares.share_of(chunks)

    def order(self, epoch: int, number: int, lengths: Int64Array) -> Int64Array:
        """The local sample at each place of a share, whose samples have so many bytes. It takes some 0.3 s for a
        million samples."""
        plan = EpochPlan(self.settings, self.shares, lambda samples: lengths, epoch, ramped=epoch == 0)
        return plan.of_share(number)[1].samples

    def whole(self, epoch: int) -> Int64Array:
        """The sample of the dataset at each position. It takes some 0.5 s for a million samples."""
        return self._epoch(epoch).whole()

    def planned_bytes(self, number: int) -> int:
        """The memory that a share is planned for."""
        settings = self.settings
        return settings.memory_bytes * int(self.shares.sizes[number]) // max(1, settings.num_samples)

    def _epoch(self, epoch: int) -> EpochPlan:
        return EpochPlan(self.settings, self.shares, self._lengths_of, epoch, ramped=epoch == 0)
