"""Ranks go on without damaged samples while pods lose their memory: what receipts say of them holds."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.membership.jobs import Packed, spec_of
from tests.membership.pods_in_process import PodsInProcess, Training
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until

from refill.errors import PodRecovering


@pytest.fixture
def broken(packed: Packed, tmp_path: Path) -> Packed:
    """Its last blob is gone."""
    copy = tmp_path / "dataset"
    shutil.copytree(urlsplit(packed[0]).path, copy)
    max(copy.rglob("*.tar")).unlink()
    return copy.as_uri(), {}


def check(training: Training, epoch: int) -> None:
    found = training.receipt(epoch)
    assert training.truth(epoch) == (0, 0), "a sample was given twice, or never"
    assert found["exact"], found
    assert found["damaged"] == len(found["damaged_samples"]), found
    assert set(found["damaged_samples"]) == set(range(NUM_SAMPLES - found["damaged"], NUM_SAMPLES)), "the last blob's"
    assert found["delivered"] == NUM_SAMPLES - found["damaged"], found


def recovered(training: Training) -> bool:
    try:
        training.look()
        training.receipt(1)
    except PodRecovering:
        return False
    return True


@pytest.mark.parametrize("journal", [False, True], ids=["no journal", "journal"])
@pytest.mark.parametrize("killed", [[0], [0, 1, 2]], ids=str)
def test_pods_are_killed(broken: Packed, tmp_path: Path, killed: list[int], journal: bool) -> None:
    with PodsInProcess(3, tmp_path, journal=journal) as pods:
        training = Training(pods, spec_of(broken), NUM_SAMPLES, goes_without_damaged=True)
        training.all_ask(0, 0, 300)
        pods.kill(*killed)
        pods.start(*killed)
        training.all_ask(0)
        check(training, 0)
        training.all_ask(1)
        check(training, 0)
        check(training, 1)
        pods.kill(*killed)
        pods.start(*killed)
        training.look()
        until(lambda: recovered(training), "what pods had delivered")
        check(training, 1)


def test_the_job_moves_to_fewer_pods(broken: Packed, tmp_path: Path) -> None:
    with PodsInProcess(3, tmp_path, journal=True) as pods:
        training = Training(pods, spec_of(broken), NUM_SAMPLES, goes_without_damaged=True)
        training.all_ask(0, 0, 400)
        pods.scale(2)
        training.all_ask(0)
        check(training, 0)
