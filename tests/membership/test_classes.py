"""Batches of classes in real pods: composed as asked, each sample once, whichever pods die, move or forget."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.membership.pods_in_process import PodsInProcess, Training
from tests.pod_fixtures import NUM_SAMPLES

from refill.errors import InvalidInput
from refill.protocol.classes import entries_of
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import Int64Array

Packed = tuple[str, dict[str, bytes]]

WORLD_SIZE, BATCH = 2, 20


class ClassTraining(Training):
    """Ranks whose batches are of one class each; class 3 is rare."""

    def __init__(self, pods: PodsInProcess, packed: Packed, **settings: Any) -> None:
        spec = JobSpec(
            f"classes-{uuid.uuid4().hex[:8]}",
            packed[0],
            **{
                "policy": "drain",
                "world_size": WORLD_SIZE,
                "chunk_size": 16,
                "memory_bytes": 1_200_000,
                "order": "explicit",
                "policy_settings": {"within": "class"},
                **settings,
            },
        )
        super().__init__(pods, spec, NUM_SAMPLES, BATCH)
        self.classes = np.minimum(np.random.default_rng(1).permutation(NUM_SAMPLES) % 100 // 33, 3)
        self.classes = self.classes + 1
        self.length = NUM_SAMPLES // WORLD_SIZE

    def post(self, epoch: int) -> None:
        random = np.random.default_rng(epoch)
        ids = random.permutation(NUM_SAMPLES)
        ids = ids[np.argsort(self.classes[ids], kind="stable")].reshape(-1, BATCH)
        ids = ids[random.permutation(len(ids))].reshape(-1, WORLD_SIZE, BATCH)
        self.asked = [ids[:, rank].ravel() for rank in range(WORLD_SIZE)]
        for rank, of_rank in zip(self.ranks, self.asked, strict=True):
            rank.post_trace(epoch, self.entries(of_rank))

    def entries(self, ids: Int64Array) -> Int64Array:
        return entries_of(ids, self.classes[ids])

    def check(self, epoch: int) -> None:
        super().check(epoch)
        for rank, asked in enumerate(self.asked):
            got = [self.samples[epoch, rank, position] for position in range(self.length)]
            assert self.classes[got].tolist() == self.classes[asked].tolist(), f"batches of rank {rank}"
            assert got != asked.tolist(), "nothing was redirected"


def test_pods_that_forget_and_move(packed: Packed, tmp_path: Path) -> None:
    with PodsInProcess(3, tmp_path, journal=False) as pods:
        training = ClassTraining(pods, packed)
        training.post(0)
        training.all_ask(0, 0, 100)
        pods.kill(1)
        pods.start(1)
        training.all_ask(0, 80, 200)
        pods.scale(2)
        training.all_ask(0)
        training.check(0)
        training.post(1)
        training.all_ask(1)
        training.check(1)


def test_pods_that_were_killed_together_and_read_their_journals(packed: Packed, tmp_path: Path) -> None:
    with PodsInProcess(2, tmp_path, journal=True) as pods:
        training = ClassTraining(pods, packed)
        training.post(0)
        training.all_ask(0, 0, 200)
        pods.kill(0, 1)
        pods.start(0, 1)
        training.all_ask(0)
        training.check(0)


def test_bytes_are_read_once(packed: Packed, tmp_path: Path) -> None:
    with PodsInProcess(2, tmp_path, journal=False) as pods:
        training = ClassTraining(pods, packed)
        for epoch in range(2):
            training.post(epoch)
            training.all_ask(epoch)
            training.check(epoch)
            counts = pods.get(0, f"/v1/jobs/{training.spec.name}/epochs/{epoch}")["total"]
            assert counts["samples_read"] == NUM_SAMPLES, counts


def test_classes_are_refused_where_they_mean_nothing(packed: Packed, tmp_path: Path) -> None:
    with PodsInProcess(1, tmp_path, journal=False) as pods:
        training = ClassTraining(pods, packed, policy_settings={})
        ids = np.arange(NUM_SAMPLES)
        with pytest.raises(InvalidInput, match="asks for sample"):
            training.ranks[0].post_trace(0, training.entries(ids))
        of_classes = ClassTraining(pods, packed)
        of_classes.ranks[0].post_trace(0, of_classes.entries(ids[::2]))
        other = entries_of(ids, of_classes.classes[ids] % 4 + 1)
        with pytest.raises(InvalidInput, match="traces ask for sample 0 as one of class"):
            of_classes.ranks[1].post_trace(0, other)
