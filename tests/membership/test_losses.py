"""Pods that lose their memory, in any order of what is said to them afterwards: exact, or said to be unknown."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.membership.pods_in_process import PodsInProcess, Training
from tests.pod_fixtures import NUM_SAMPLES

from refill.protocol.job_spec import JobSpec

Packed = tuple[str, dict[str, bytes]]


def spec_of(packed: Packed, **settings: Any) -> JobSpec:
    name = f"losses-{uuid.uuid4().hex[:8]}"
    return JobSpec(name, packed[0], **({"chunk_size": 16, "memory_bytes": 600_000, "world_size": 2} | settings))


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[PodsInProcess]:
    with PodsInProcess(3, tmp_path, journal=False) as pods:
        yield pods


@pytest.mark.parametrize("killed", [[0], [1], [0, 1, 2]], ids=str)
def test_killed_without_journals(packed: Packed, pods: PodsInProcess, killed: list[int]) -> None:
    training = Training(pods, spec_of(packed), NUM_SAMPLES)
    training.all_ask(0, 0, 200)
    pods.kill(*killed)
    pods.start(*killed)
    training.all_ask(0)
    training.check(0)
    training.all_ask(1)
    training.check(1)


def test_an_epoch_apart(packed: Packed, pods: PodsInProcess) -> None:
    """Rank 0 has had all of the next epoch that it may, and asks for the one after, while rank 1 is in the first."""
    training = Training(pods, spec_of(packed, memory_bytes=4_000_000 // 2), NUM_SAMPLES)
    training.all_ask(0, 0, 100)
    training.ask(0, 0)
    training.ask(0, 1)
    training.ranks[0].timeout_seconds = 1
    with pytest.raises(Exception, match="waits for rank 1"):
        training.ask(0, 2)
    pods.kill(1)
    pods.start(1)
    training.ranks[0].timeout_seconds = 30
    training.ask(1, 0)
    training.check(0)
    training.ask(1, 1)
    training.check(1)
