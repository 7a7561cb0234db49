"""What `helm upgrade` does to jobs that run: docs/INSTALL.md, "Upgrades" and "Scaling"."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helm.rendering import Release, release
from tests.helm.stateful_pods import StatefulPods
from tests.integration.job_ranks import BATCH, Ranks, exact_receipt, receipt, settings_of
from tests.pod_fixtures import NUM_SAMPLES, rank_of

from refill.errors import JobLost

Packed = tuple[str, dict[str, bytes]]


def pods(replicas: int, *, persistent: bool, **settings: Any) -> Release:
    values = {
        "replicas": replicas,
        "memory": "4Mi",
        "journal": {"persistent": persistent},
        "settings": {"pinned_fraction": 0, "drain_seconds": 0, **settings},
    }
    return release(values)


@pytest.mark.parametrize(
    ("replicas", "persistent"),
    [
        pytest.param(1, True, id="1-volumes", marks=pytest.mark.variant),
        pytest.param(1, False, id="1-emptyDir"),
        pytest.param(2, True, id="2-volumes"),
        pytest.param(2, False, id="2-emptyDir", marks=pytest.mark.variant),
    ],
)
def test_a_job_goes_on_while_its_pods_are_replaced(
    packed: Packed, tmp_path: Path, replicas: int, persistent: bool
) -> None:
    before, after = (pods(replicas, persistent=persistent, log_level=level) for level in ("info", "debug"))
    with StatefulPods(before, tmp_path, replicas) as running:
        job = settings_of(packed[0])
        ranks = Ranks(running, job)  # type: ignore[arg-type]
        ranks.ask(0, 0, 60)
        asked = 60

        def train() -> None:
            nonlocal asked
            ranks.ask(0, asked - 20, asked + 40)
            asked += 40

        running.upgrade(after, train)
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        exact_receipt(running, job, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after", "persistent"),
    [
        pytest.param(2, 3, False, id="2-3-emptyDir"),
        pytest.param(2, 3, True, id="2-3-volumes", marks=pytest.mark.variant),
        pytest.param(3, 2, False, id="3-2-emptyDir", marks=pytest.mark.variant),
        pytest.param(3, 2, True, id="3-2-volumes"),
    ],
)
def test_a_job_moves_to_another_number_of_pods(
    packed: Packed, tmp_path: Path, before: int, after: int, persistent: bool
) -> None:
    """Ranks ask on while old pods and new ones, which do not agree on who owns what, are there together."""
    with StatefulPods(pods(before, persistent=persistent), tmp_path, max(before, after)) as running:
        job = settings_of(packed[0])
        ranks = Ranks(running, job)  # type: ignore[arg-type]
        ranks.ask(0, 0, 100)

        def train() -> None:
            for start in range(100, 300, BATCH):
                ranks.ask(0, start, start + BATCH)
                time.sleep(0.5)

        with ThreadPoolExecutor(1) as training:
            done = training.submit(train)
            running.upgrade(pods(after, persistent=persistent))
            done.result(120)
        ranks.ask(0, 300, ranks.length)
        ranks.check(0)
        exact_receipt(running, job, 0)  # type: ignore[arg-type]
        ranks.ask(1, 0, ranks.length)
        ranks.check(1)
        exact_receipt(running, job, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("before", "after"), [pytest.param(2, 3, marks=pytest.mark.variant), (3, 2)])
def test_a_job_resumes_on_another_number_of_pods(packed: Packed, tmp_path: Path, before: int, after: int) -> None:
    """Between two runs, from a checkpoint; who starts it without is told in one line what to do."""
    with StatefulPods(pods(before, persistent=True), tmp_path, max(before, after)) as running:
        job = settings_of(packed[0], world_size=2, policy="drain")
        ranks = Ranks(running, job)  # type: ignore[arg-type]
        ranks.ask(0, 0, 200)
        incarnation = ranks.ranks[0].info()["incarnation"]
        consumed = set(ranks.samples.values())
        ranks.ask(0, 200, 240)  # trained on after the checkpoint was saved
        ranks.ranks.clear()
        gc.collect()  # with what looks after their homes
        running.upgrade(pods(after, persistent=True))
        with pytest.raises(JobLost, match=f"ran on {before} pods, and there are {after} now: resume it"):
            rank_of(running, job).info()  # type: ignore[arg-type]
        again = [rank_of(running, job, rank) for rank in range(2)]  # type: ignore[arg-type]
        for rank in again:
            rank.resume(incarnation, 0, 200)
        length = int(again[0].info()["resumed"]["samples_per_rank"])
        rest: list[int] = []
        for start in range(0, length, BATCH):
            positions = np.arange(start, min(start + BATCH, length))
            for rank in again:
                rest += rank.batch(0, positions).sample_ids.tolist()
        assert consumed.isdisjoint(rest), "a sample came twice"
        assert len(consumed | set(rest)) == NUM_SAMPLES, "samples are missing"
        assert receipt(running, job, 0)["exact"]  # type: ignore[arg-type]
