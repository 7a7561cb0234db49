"""Errors that the tables of CLIENT.md and TROUBLESHOOTING.md name, each from doing what its row says.

Others are produced where their subject is tested: tests/end_to_end/test_docs_rows.py has the list.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import free_port
from tests.membership.pods_in_process import Packed, PodsInProcess, Rank, Training, spec_of
from tests.pod_fixtures import NUM_SAMPLES

from refill.errors import (
    DatasetNotFound,
    EpochNotReady,
    InvalidInput,
    JobConflict,
    MemoryTooSmall,
    PodUnreachable,
    RankHeld,
    StoreDenied,
)
from refill.pods.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec


@pytest.fixture(scope="module")
def pods() -> Iterator[PodsInProcess]:
    with PodsInProcess(1) as pods:
        yield pods


def test_no_pod_listens_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    rank = PodConnection(url, JobSpec("job", "file:///data"), 0, None, 0)
    with pytest.raises(PodUnreachable, match=f"{url} does not answer: .*Connection refused"):
        rank.info()


def test_the_name_is_in_use_with_other_settings(packed: Packed, pods: PodsInProcess) -> None:
    spec = spec_of(packed[0], world_size=1)
    Rank(pods, spec, 0).info()
    with pytest.raises(JobConflict, match=f"job {spec.name} was registered before with other settings"):
        Rank(pods, dataclasses.replace(spec, seed=1), 0).info()


def test_there_is_no_index(packed: Packed, pods: PodsInProcess, tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFound, match=r"no dataset there .*make one with `refill pack`"):
        Rank(pods, dataclasses.replace(spec_of(packed[0]), dataset=tmp_path.as_uri()), 0).info()


def test_pods_may_not_read_it(packed: Packed, pods: PodsInProcess, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "refill.index").symlink_to("/etc/hostname")
    with pytest.raises(StoreDenied):
        Rank(pods, dataclasses.replace(spec_of(packed[0]), dataset=(tmp_path / "data").as_uri()), 0).info()


def test_a_chunk_does_not_fit(packed: Packed, pods: PodsInProcess) -> None:
    spec = spec_of(packed[0], world_size=1, chunk_size=64, memory_bytes=150_000)
    its_own = r"raise the job's own memory_bytes, which is 150,000, or lower chunk_size$"
    said = rf"memory too small: .* its largest chunk of 64 samples takes .*; {its_own}"
    with pytest.raises(MemoryTooSmall, match=said):
        Rank(pods, spec, 0).info()


def test_the_rank_was_another_process_a_moment_ago(packed: Packed, pods: PodsInProcess) -> None:
    spec = spec_of(packed[0], world_size=1)
    Rank(pods, spec, 0).batch(0, np.arange(10))
    other = Rank(pods, spec, 0, process=2, timeout_seconds=0)
    with pytest.raises(RankHeld, match=f"rank 0 of job {spec.name} is .*heard"):
        other.batch(0, np.arange(10))


def test_a_number_of_steps_is_no_epoch(packed: Packed, pods: PodsInProcess) -> None:
    training = Training(pods, spec_of(packed[0], world_size=1), NUM_SAMPLES)
    training.ask(0, 0, 0, 20)
    with pytest.raises(InvalidInput, match=r"asks for epoch 40000 while job .* is in epoch 0"):
        training.ask(0, 40_000, 0, 20)


def test_pods_say_whom_requests_wait_for(packed: Packed, pods: PodsInProcess, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(pods, spec_of(packed[0]), NUM_SAMPLES, timeout_seconds=2)
    training.ask(0, 0, 0, 20)
    with caplog.at_level(logging.INFO), pytest.raises(EpochNotReady, match="waits for rank 1 to finish epoch 0"):
        training.ask(0, 1, 0, 20)
    of_pod = [line for line in caplog.messages if line.startswith("requests wait: ")]
    assert any("waits for rank 1 to finish epoch 0" in line for line in of_pod), caplog.messages
    assert len(of_pod) == len(set(of_pod)), "the same is said again and again"
