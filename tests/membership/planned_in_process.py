"""Ranks of planned jobs at pods in one process, as training scripts have them, and the order that their plan says."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from functools import lru_cache
from typing import Any

import numpy as np
from tests.membership.pods_in_process import CalledPods, PodsInProcess
from tests.waiting import until, until_answered

import refill
from refill.pods.planned_connection import PlannedConnection
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.rank_life import RankLife
from refill_service.cache_core.planned.epoch_plan import EpochPlan
from refill_service.cache_core.planned.shares import Shares
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.datasets.dataset_reader import Dataset

__all__ = ["BATCH", "PlannedDataset", "PlannedRank", "Run", "new_name", "order_of"]

BATCH = 50

_processes = itertools.count(1_000_000)


def new_name() -> str:
    return f"planned-{uuid.uuid4().hex[:8]}"


class PlannedRank(PlannedConnection):
    """A rank's connection as it is, but that pods are called, and that tests say when it looks after its home."""

    life = RankLife("test", 1, 1, "")
    is_direct = True
    """Whether it asks pods itself for what they have, or has its home do so."""

    def asks_its_home(self) -> None:
        """Fact: from now on its home asks the others."""
        self.is_direct, self._direct = False, None

    def _registered(self, info: dict[str, Any]) -> None:
        super()._registered(info)
        if not self.is_direct:
            self._direct = None

    def _life(self) -> RankLife:
        return self.life

    @classmethod
    def at(cls, pods: PodsInProcess, home: int, life: RankLife, *arguments: Any, **named: Any) -> PlannedRank:
        found = cls(pods.pod_urls[home], *arguments, **named)
        found._channel = found._probes = CalledPods(pods)
        found._watched = True
        found.life = life
        return found

    def pods_of_positions(self, epoch: int, positions: list[int]) -> list[str]:
        """Who has the samples of these places of the rank."""
        self.info()
        assert self._direct is not None
        dealt = self.dealing(epoch).positions(self.group, np.array(positions))
        return [pod for pod, _ in self._direct.parts(epoch, dealt)]

    def look(self) -> None:
        """All that is due at some time is due now."""
        self._heard_at = self._back_at = 0.0
        self._unreported.epoch_is_over()
        self.look_after_home()


class PlannedDataset(refill.CacheDataset):
    """A dataset of a training script: each one is a process of its own.

    :param first_pod: whose URL it is given.
    """

    def __init__(
        self, pods: PodsInProcess, *, first_pod: int = 0, timeout_seconds: float = 30, **settings: Any
    ) -> None:
        self._pods_here, self._first_pod = pods, first_pod
        self._of_process = RankLife("test", next(_processes), 1, "")
        given = {"policy": "planned", "chunk_size": 16, "memory_bytes": 600_000, "seed": 7}
        super().__init__(pods.pod_urls[first_pod], timeout_seconds=timeout_seconds, **(given | settings))

    def _new_connection(self) -> PlannedRank:
        made = super()._new_connection()
        assert isinstance(made, PlannedConnection)
        return PlannedRank.at(
            self._pods_here,
            self._first_pod,
            self._of_process,
            made.spec,
            made.rank,
            None,
            made.timeout_seconds,
            goes_without_damaged=self._skips_damaged,
            allow_skipped=self.allow_skipped,
            place=self._place,
            hashes=self._hashes,
            cut=made.cut,
        )


class Run:
    """The ranks of a job, in step, and what came of it: held against what the plan says.

    :param states: one for each rank, or one for all.
    :param way: how states are loaded: ``resume``, by the argument, or ``load``, by the sampler.
    """

    def __init__(
        self,
        pods: PodsInProcess,
        packed: str,
        name: str,
        num_ranks: int,
        states: Any = None,
        way: str = "resume",
        **more: Any,
    ) -> None:
        self.pods, self.name = pods, name
        of_rank = states if isinstance(states, list) else [states] * num_ranks
        self.datasets = [
            PlannedDataset(
                pods,
                dataset=packed,
                job=name,
                rank=rank,
                world_size=num_ranks,
                resume=of_rank[rank] if way == "resume" else None,
                **more,
            )
            for rank in range(num_ranks)
        ]
        if way == "load" and states is not None:
            for dataset, state in zip(self.datasets, of_rank, strict=True):
                dataset.checked_state(state)
        self.came: list[tuple[int, int, int]] = []
        """Epoch, position of its one order, and sample."""

    @property
    def ranks(self) -> list[PlannedRank]:
        found = [dataset.connection for dataset in self.datasets]
        return [rank for rank in found if isinstance(rank, PlannedRank)]

    @property
    def plan(self) -> PlanSettings:
        return PlanSettings.from_dict(self.ranks[0].plan)

    def length(self, epoch: int) -> int:
        return self.datasets[0].positions_in(epoch)

    def take(self, epoch: int, first: int = 0, end: int | None = None, ranks: list[int] | None = None) -> None:
        end = self.length(epoch) if end is None else end
        for start in range(first, end, BATCH):
            for rank in range(len(self.datasets)) if ranks is None else ranks:
                self.take_batch(rank, epoch, np.arange(start, min(start + BATCH, end)))

    def take_batch(self, rank: int, epoch: int, positions: Any) -> None:
        connection = self.ranks[rank]
        ids = connection.batch(epoch, positions).sample_ids.tolist()
        dealing = connection.dealing(epoch)
        places = dealing.positions(rank, positions) % dealing.num_positions
        self.came += [(epoch, place, sample) for place, sample in zip(places.tolist(), ids, strict=True)]

    def states(self, epoch: int, position: int) -> list[dict[str, Any]]:
        return [each.state_at(epoch, position, each.positions_in(epoch)) for each in self.datasets]

    def positions_of(self, epoch: int) -> list[int]:
        return [place for of_epoch, place, _ in self.came if of_epoch == epoch]

    def check(self, packed: str) -> None:
        """What came is what the plan says."""
        for epoch in sorted({epoch for epoch, _, _ in self.came}):
            order = order_of(packed, self.plan, epoch)
            wrong = [(place, sample) for of, place, sample in self.came if of == epoch and order[place] != sample]
            assert not wrong, f"epoch {epoch}: (position, sample) {wrong[:5]}, and the plan says otherwise"

    def look(self) -> None:
        for rank in self.ranks:
            until_answered(rank.look)

    def receipt(self, epoch: int, pod: int = 0) -> dict[str, Any]:
        return self.pods.get(pod, f"/v1/jobs/{self.name}/epochs/{epoch}/receipt")

    def exact_receipt(self, epoch: int, pod: int = 0) -> dict[str, Any]:
        """Pods that were away may be thought to be so for a moment more."""
        found = {}

        def is_exact() -> bool:
            self.look()
            found.update(self.receipt(epoch, pod))
            return bool(found["exact"])

        try:
            until(is_exact, "an exact receipt")
        except AssertionError as error:
            raise AssertionError(f"{error}: {found}") from None
        return found


@lru_cache(maxsize=64)
def order_of(packed: str, plan: PlanSettings, epoch: int) -> list[int]:
    """The sample at each position."""
    found: list[int] = asyncio.run(_order_of(packed, plan, epoch)).tolist()
    return found


async def _order_of(packed: str, plan: PlanSettings, epoch: int) -> Any:
    dataset = await Dataset.open(packed)
    try:
        records = await dataset.load_records(0, dataset.num_samples)
        shares = Shares(ChunkLayout(dataset.blobs.first_sample, plan.chunk_size), plan.num_shares)
        return EpochPlan(plan, shares, lambda samples: records.length[samples], epoch, ramped=epoch == 0).whole()
    finally:
        await dataset.close()
