"""That what went wrong with a planned job is seen: answers that are not the plan's, or that were never given."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.chaos.chaos_dataset import ChaosDataset
from tests.chaos.epoch_orders import PlannedOrder
from tests.chaos.planned_truth import Leg, PlannedTruth
from tests.chaos.rank import Answer

from refill.protocol.dealing import Dealing
from refill.protocol.plan_settings import PlanSettings
from refill_service.cache_core.planned.epoch_plan import EpochPlan
from refill_service.cache_core.planned.shares import Shares
from refill_service.cache_core.sample_mapping import ChunkLayout

N, BATCH = 50, 3
DATASET = ChaosDataset("s3://none", {}, list(range(N)), np.full(N, 100), np.array([0, 20, N]))
SETTINGS = PlanSettings("none", N, 4, 2, memory_bytes=1000, run=4)
SHARES = Shares(ChunkLayout(DATASET.first_sample, 4), 2)
ORDERS = [EpochPlan(SETTINGS, SHARES, lambda ids: DATASET.lengths[ids], e, ramped=not e).whole() for e in range(2)]


def answers(rank: int, dealing: Dealing, epoch: int = 0, first: int = 0, end: int | None = None) -> list[Answer]:
    positions = np.arange(first, dealing.per_rank if end is None else end)
    samples = ORDERS[epoch][dealing.positions(rank, positions) % N].tolist()
    return [Answer(epoch, [at], [sample], [sample]) for at, sample in zip(positions.tolist(), samples, strict=True)]


def written(path: Path, found: list[Answer]) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in found))
    return path


def problems(leg: Leg, drop_last: bool = False) -> list[str]:
    order = PlannedOrder(DATASET, SETTINGS.to_dict())
    truth = PlannedTruth(leg, DATASET.checksums, order, BATCH, drop_last=drop_last)
    return truth.damaged + [text for epoch in range(2) for text in truth.problems_of(epoch)]


def whole(folder: Path, num_ranks: int, drop_last: bool = False) -> list[list[Answer]]:
    dealing = Dealing(N, num_ranks, BATCH, drop_last=drop_last)
    return [[*answers(rank, dealing, 0), *answers(rank, dealing, 1)] for rank in range(num_ranks)]


def leg_of(folder: Path, found: list[list[Answer]]) -> Leg:
    return Leg([written(folder / str(rank), each) for rank, each in enumerate(found)])


@pytest.mark.parametrize(("num_ranks", "drop_last"), [(1, False), (3, False), (3, True)])
def test_nothing_to_say(tmp_path: Path, num_ranks: int, drop_last: bool) -> None:
    assert problems(leg_of(tmp_path, whole(tmp_path, num_ranks, drop_last)), drop_last) == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda each: each._replace(samples=[(each.samples[0] + 1) % N]), "the plan has"),
        (lambda each: each._replace(checksums=[N]), "the bytes of sample"),
        (lambda each: None, "1 positions without an answer"),
    ],
)
def test_what_goes_wrong_is_named(tmp_path: Path, damage: Callable[[Answer], Answer | None], said: str) -> None:
    found = whole(tmp_path, 3)
    changed = damage(found[1][3])
    found[1][3:4] = [] if changed is None else [changed]
    assert any(said in problem for problem in problems(leg_of(tmp_path, found)))


@pytest.mark.parametrize(("num_ranks", "kept"), [(2, 5), (3, 0), (4, 6)])
def test_others_go_on_from_a_checkpoint(tmp_path: Path, num_ranks: int, kept: int) -> None:
    """What the ranks before had received after it counts for nothing."""
    before = leg_of(tmp_path, [answers(rank, Dealing(N, 2, BATCH), end=9) for rank in range(2)])
    same = num_ranks == 2
    dealing = Dealing(N, num_ranks, BATCH, start=0 if same else 2 * kept)
    later = [
        [*answers(rank, dealing, first=kept if same else 0), *answers(rank, Dealing(N, num_ranks, BATCH), 1)]
        for rank in range(num_ranks)
    ]
    files = [written(tmp_path / f"later {rank}", each) for rank, each in enumerate(later)]
    leg = Leg(files, 0, kept if same else 0, before, dealing.start, kept)
    assert problems(leg) == []
    assert problems(replace(leg, saved_at=kept + 1)), "the ranks before had one more each"
