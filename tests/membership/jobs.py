"""Which jobs do these tests run, and how are they resumed?"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import numpy as np
from tests.membership.pods_in_process import PodsInProcess, Rank, Training

from refill.protocol.job_spec import JobSpec

__all__ = ["Packed", "rest_of", "resumed", "spec_of"]

Packed = tuple[str, dict[str, bytes]]


def spec_of(packed: Packed, **settings: Any) -> JobSpec:
    name = f"losses-{uuid.uuid4().hex[:8]}"
    how = {"policy": "redox", "chunk_size": 16, "memory_bytes": 600_000, "world_size": 2}
    return JobSpec(name, packed[0], **(how | settings))


def resumed(pods: PodsInProcess, training: Training, world_size: int, process: int, position: int = 100) -> list[Rank]:
    """Ranks of another number, that load the state of epoch 0 at a position."""
    incarnation = training.ranks[0].info()["incarnation"]
    spec = replace(training.spec, world_size=world_size)
    ranks = [Rank(pods, spec, rank, process=process, timeout_seconds=5) for rank in range(world_size)]
    for rank in ranks:
        rank.resume(incarnation, 0, position)
    return ranks


def rest_of(ranks: list[Rank], epoch: int, of_rest: bool = True) -> list[int]:
    info = ranks[0].info()
    length = info["resumed"]["samples_per_rank"] if of_rest else info["samples_per_rank"]
    return [
        sample
        for start in range(0, length, 50)
        for rank in ranks
        for sample in rank.batch(epoch, np.arange(start, min(start + 50, length))).sample_ids.tolist()
    ]
