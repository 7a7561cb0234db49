"""The receipt of an epoch in which not every pod was asked for anything: it says what is known."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import numpy as np
import pytest
from tests.membership.pods_in_process import PodsInProcess, Training
from tests.pod_fixtures import NUM_SAMPLES, write_files

from refill.errors import InvalidInput, UnknownJob
from refill.protocol.job_spec import JobSpec
from refill_service.datasets.pack import pack

Packed = tuple[str, dict[str, bytes]]


def spec_of(url: str, **settings: object) -> JobSpec:
    how = {"policy": "redox", "chunk_size": 16, "memory_bytes": 600_000, "world_size": 2} | settings
    return JobSpec(f"running-{uuid.uuid4().hex[:8]}", url, **how)  # type: ignore[arg-type]


def one_sample_was_delivered(training: Training, pod: int = 0) -> bool:
    found = training.receipt(0, pod)
    counts = [found[name] for name in ("requests", "delivered", "missing", "unknown", "duplicates", "exact")]
    return counts == [NUM_SAMPLES, 1, NUM_SAMPLES - 1, 0, 0, False]


@pytest.mark.parametrize("journal", [True, False], ids=["journal", "no journal"])
def test_one_pod_was_not_asked_yet(packed: Packed, tmp_path: Path, journal: bool) -> None:
    with PodsInProcess(2, tmp_path, journal=journal) as pods:
        training = Training(pods, spec_of(packed[0]), NUM_SAMPLES)
        with pytest.raises(InvalidInput, match=r"epoch 0 of job .* has not begun"):
            training.receipt(0)
        training.ask(0, 0, end=1)
        for pod in (0, 1):
            assert one_sample_was_delivered(training, pod)
            assert training.receipt(0, pod)["running"]
            with pytest.raises(InvalidInput, match=r"epoch 1 of job .* has not begun"):
                training.receipt(1, pod)
        if journal:
            pods.kill(0, 1)
            pods.start(0, 1)
            assert one_sample_was_delivered(training, 1), "as journals have it, before anybody registers the job"
        training.ask(0, 0, end=1)
        training.ranks[0].end_job()
        assert one_sample_was_delivered(training, 1)
        assert training.receipt(0)["ended"]


def test_an_epoch_that_asks_nothing_of_a_pod(packed: Packed, tmp_path: Path) -> None:
    """As with a sampler that draws from a part of the dataset."""
    part = NUM_SAMPLES // 4
    with PodsInProcess(2, tmp_path, journal=False) as pods:
        training = Training(pods, spec_of(packed[0], order="explicit"), part)
        for epoch in range(6):
            size = NUM_SAMPLES if epoch % 2 else part
            for rank in training.ranks:
                rank.post_trace(epoch, np.arange(rank.rank, size, 2))
            training.length = size // 2
            training.all_ask(epoch)
        for epoch in range(6):
            found = training.receipt(epoch)
            assert (found["exact"], found["delivered"]) == (True, NUM_SAMPLES if epoch % 2 else part), epoch
        training.ranks[0].end_job()
        for epoch in range(6):
            found = training.receipt(epoch, 1)
            assert (found["exact"], found["delivered"]) == (True, NUM_SAMPLES if epoch % 2 else part), epoch


@pytest.mark.parametrize("journal", [True, False], ids=["journal", "no journal"])
def test_a_pod_owns_nothing(tmp_path: Path, journal: bool) -> None:
    """The dataset has fewer chunks than there are pods."""
    (tmp_path / "files").mkdir()
    write_files(tmp_path / "files", 20)
    asyncio.run(pack(str(tmp_path / "files"), (tmp_path / "store").as_uri()))
    with PodsInProcess(3, tmp_path, journal=journal) as pods:
        training = Training(pods, spec_of((tmp_path / "store").as_uri()), 20)
        for epoch in range(2):
            training.all_ask(epoch)
            training.check(epoch)
        if journal:
            pods.kill(0, 1, 2)
            pods.start(0, 1, 2)
            training.check(1)
        training.all_ask(1)
        training.ranks[0].end_job()
        training.check(1)


def test_what_a_lost_pod_delivered_is_not_taken_for_nothing(packed: Packed, tmp_path: Path) -> None:
    with PodsInProcess(2, tmp_path, journal=False) as pods:
        training = Training(pods, spec_of(packed[0]), NUM_SAMPLES)
        training.ask(0, 0, end=1)
        was_asked = next(pod for pod in (0, 1) if pods.node(pod).jobs[training.spec.name].owner.books.has_opened(0))
        pods.kill(was_asked)
        pods.start(was_asked)
        with pytest.raises(UnknownJob, match=f"what pod {was_asked} delivered in epoch 0 .* not known any more"):
            training.receipt(0, was_asked)
