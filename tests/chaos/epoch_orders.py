"""Which sample has each position of an epoch's one order? By a plan, by lists of ranks' own, or woven of several plans.

Each is called with an epoch and says ``(positions,)`` samples; what is wrong with an order itself is in ``damaged``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from tests.chaos.chaos_dataset import ChaosDataset, ChaosMixture

from refill.protocol.mixture_order import BLOCK, MemberPlace, MixtureEpoch
from refill.protocol.mixture_weights import MixtureWeights
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.wire_format import Int64Array
from refill_service.cache_core.planned.epoch_plan import EpochPlan
from refill_service.cache_core.planned.shares import Shares
from refill_service.cache_core.sample_mapping import ChunkLayout

__all__ = ["EpochOrder", "ListedOrder", "MixedOrder", "PlannedOrder", "plan_id_of"]


class EpochOrder(Protocol):
    damaged: list[str]

    def __call__(self, epoch: int) -> Int64Array: ...


def plan_id_of(plan: Mapping[str, Any]) -> str:
    """What tells plans apart, of a job or of a mixture: there it is of the plans of its datasets, the same from leg to
    leg."""
    if "plans" not in plan:
        return PlanSettings.from_dict(plan).plan_id
    return " ".join(PlanSettings.from_dict(each).plan_id for each in plan["plans"].values())


class PlannedOrder:
    """
    :param plan: as the pods have it.
    """

    def __init__(self, dataset: ChaosDataset, plan: Mapping[str, Any]) -> None:
        self.damaged: list[str] = []
        self._dataset, self._settings = dataset, PlanSettings.from_dict(plan)
        self._shares = Shares(ChunkLayout(dataset.first_sample, self._settings.chunk_size), self._settings.num_shares)
        self._known: dict[int, Int64Array] = {}

    def __call__(self, epoch: int) -> Int64Array:
        if epoch not in self._known:
            lengths = self._dataset.lengths
            found = EpochPlan(self._settings, self._shares, lambda ids: lengths[ids], epoch, ramped=not epoch).whole()
            if sorted(found.tolist()) != list(range(len(self._dataset.checksums))):
                self.damaged.append(f"epoch {epoch}: the plan does not give every sample once")
            self._known[epoch] = found
        return self._known[epoch]


class ListedOrder:
    """Of ranks that ask by lists of their own (:func:`tests.chaos.rank.trace_of`)."""

    def __init__(self, num_positions: int, seed: int) -> None:
        self.damaged: list[str] = []
        self._num_positions, self._seed = num_positions, seed

    def __call__(self, epoch: int) -> Int64Array:
        return np.random.default_rng([self._seed, epoch]).permutation(self._num_positions)


class MixedOrder:
    """Of a mixture, whose samples are numbered through all datasets.

    :param plan: of the mixture, with the plans of its datasets, as a rank has it.
    :param seed: of the mixture.
    """

    def __init__(self, mixture: ChaosMixture, plan: Mapping[str, Any], seed: int) -> None:
        self._orders = [PlannedOrder(each, plan["plans"][name]) for name, each in mixture.datasets.items()]
        self._sizes = [len(each.checksums) for each in mixture.datasets.values()]
        self._first_ids = np.cumsum([0, *self._sizes])
        self._names, self._seed = list(mixture.datasets), seed
        how = {"weights": None, "repeat": None, "choose": None, "epoch_size": None} | dict(mixture.how)
        self._weights = MixtureWeights.of(self._names, **how)

    @property
    def damaged(self) -> list[str]:
        return [
            f"{name}, {said}" for name, each in zip(self._names, self._orders, strict=True) for said in each.damaged
        ]

    def __call__(self, epoch: int) -> Int64Array:
        members, passes, within = self._places(epoch)
        found = np.empty(len(members), dtype=np.int64)
        for member, number in {*zip(members.tolist(), passes.tolist(), strict=True)}:
            here = (members == member) & (passes == number)
            found[here] = self._orders[member](number)[within[here]] + self._first_ids[member]
        return found

    def passes(self, planned_in: Callable[[int], int], epochs: int) -> dict[tuple[str, int], tuple[int, int]]:
        """By dataset and number of a pass: how many samples it has, and how many of them came in these epochs.

        :param planned_in: how many positions of an epoch are dealt.
        """
        came: dict[tuple[str, int], tuple[int, int]] = {}
        for epoch in range(epochs):
            members, passes, _ = (each[: planned_in(epoch)] for each in self._places(epoch))
            for member, number in {*zip(members.tolist(), passes.tolist(), strict=True)}:
                count = int(((members == member) & (passes == number)).sum())
                of_pass = self._names[member], number
                came[of_pass] = self._sizes[member], came.get(of_pass, (0, 0))[1] + count
        return came

    def _places(self, epoch: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """``(positions,)`` each: the dataset, the pass over it, and the place in that."""
        places = [MemberPlace() for _ in self._sizes]
        for each in range(epoch + 1):
            counts = self._weights.counts(each, self._sizes, self._seed)
            of_each = list(zip(self._sizes, counts, strict=True))
            places = [place.begins(*of) for place, of in zip(places, of_each, strict=True)]
            if each < epoch:
                places = [place.after(*of) for place, of in zip(places, of_each, strict=True)]
        members, nth = MixtureEpoch(counts, BLOCK, self._seed, epoch).samples_at(np.arange(sum(counts)))
        first, position = np.array([[place.number, place.position] for place in places]).T
        more, within = np.divmod(position[members] + nth, np.array(self._sizes)[members])
        return members, first[members] + more, within
