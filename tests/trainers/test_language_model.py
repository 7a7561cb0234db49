"""A small GPT on a mixture of two datasets, packed into sequences: killed, it goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trainers.launching import launched

from refill_service.datasets.index_shards import index_shards
from refill_service.demo.local_cluster import LocalCluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "language_model.py"
pytestmark = [pytest.mark.timeout(600), pytest.mark.variant]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    status, said = launched([str(EXAMPLE), "prepare", str(folder)], folder / "said.log", processes=1, cwd=folder)
    assert status == 0, said
    for name in ("code", "text"):
        asyncio.run(index_shards((folder / name).as_uri()))
    return folder


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(3, tmp_path_factory.mktemp("pods"), {"memory_bytes": "16MiB", "wait_seconds": 1}) as cluster:
        yield cluster


def losses(pods: LocalCluster, corpus: Path, job: str, checkpoint: Path, *more: str, ranks: int = 1) -> dict[int, str]:
    """By step, in hexadecimal."""
    options = ["--checkpoint", str(checkpoint), "--steps", "20", *more]
    command = [str(EXAMPLE), "train", pods.pod_urls[0], job, corpus.as_uri(), *options]
    status, said = launched(command, checkpoint.with_suffix(".log"), processes=ranks, cwd=checkpoint.parent)
    assert status == ("--crash-at" in more), said[-4000:]
    return {int(step): loss for step, loss in re.findall(r"step (\d+): loss (\S+)", said)}


def test_losses_after_a_crash_are_those_of_an_undisturbed_run_to_the_bit_and_near_on_other_ranks(
    pods: LocalCluster, corpus: Path, tmp_path: Path
) -> None:
    name = f"gpt-{uuid.uuid4().hex[:8]}"
    undisturbed = losses(pods, corpus, f"{name}-a", tmp_path / "a.pt")
    crashed = losses(pods, corpus, f"{name}-b", tmp_path / "b.pt", "--crash-at", "15")
    assert crashed == {step: undisturbed[step] for step in range(1, 16)}
    kept = (tmp_path / "b.pt").read_bytes()
    pods.kill(1)
    again = losses(pods, corpus, f"{name}-b", tmp_path / "b.pt")
    assert again == {step: undisturbed[step] for step in range(11, 21)}
    pods.restart(1)
    (tmp_path / "b.pt").write_bytes(kept)
    on_two = losses(pods, corpus, f"{name}-b", tmp_path / "b.pt", ranks=2)
    assert list(on_two) == list(range(11, 21))
    for step, loss in on_two.items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(undisturbed[step]), abs=1e-4)
