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
