"""What `helm upgrade` does to jobs that run: docs/INSTALL.md, "Upgrades" and "Scaling"."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.helm.rendering import Release, release
from tests.helm.stateful_pods import StatefulPods
from tests.integration.job_ranks import BATCH, Ranks, exact_receipt, settings_of

Packed = tuple[str, dict[str, bytes]]


def pods(replicas: int, **settings: Any) -> Release:
    return release(
        {
            "replicas": replicas,
            "memory": "4Mi",
            "settings": {"pinned_fraction": 0, "drain_seconds": 0, **settings},
        }
    )


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.variant), 2])
def test_a_job_goes_on_while_its_pods_are_replaced(packed: Packed, tmp_path: Path, replicas: int) -> None:
    before, after = (pods(replicas, log_level=level) for level in ("info", "debug"))
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
    ("before", "after"), [pytest.param(2, 3, id="2-3", marks=pytest.mark.variant), pytest.param(3, 2, id="3-2")]
)
def test_a_job_goes_on_with_another_number_of_pods(packed: Packed, tmp_path: Path, before: int, after: int) -> None:
    """Ranks ask on while old pods and new ones, which do not agree on who has what, are there together."""
    with StatefulPods(pods(before), tmp_path, max(before, after)) as running:
        job = settings_of(packed[0])
        ranks = Ranks(running, job)  # type: ignore[arg-type]
        ranks.ask(0, 0, 100)

        def train() -> None:
            for start in range(100, 300, BATCH):
                ranks.ask(0, start, start + BATCH)
                time.sleep(0.5)

        with ThreadPoolExecutor(1) as training:
            done = training.submit(train)
            running.upgrade(pods(after))
            done.result(120)
        ranks.ask(0, 300, ranks.length)
        ranks.check(0)
        exact_receipt(running, job, 0)  # type: ignore[arg-type]
        ranks.ask(1, 0, ranks.length)
        ranks.check(1)
        exact_receipt(running, job, 1)  # type: ignore[arg-type]
