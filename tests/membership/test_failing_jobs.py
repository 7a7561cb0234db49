"""A job that fails as it is closed or removed does that alone: the pod's other jobs go on, and leave what they have."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tests.membership.jobs import Packed, spec_of
from tests.membership.pods_in_process import PodsInProcess, Training
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until


async def fails(*_: Any) -> None:
    raise RuntimeError("its dataset can't be closed")


def test_the_others_keep_their_journals_when_one_is_not_closed(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with PodsInProcess(1, tmp_path, journal=True) as pods:
        failing, other = (Training(pods, spec_of(packed, world_size=1), NUM_SAMPLES) for _ in range(2))
        for training in (failing, other):
            training.ask(0, 0, 0, 200)
        monkeypatch.setattr(pods.node(0).jobs[failing.spec.name].job.dataset, "close", fails)
        with caplog.at_level(logging.ERROR):
            pods.end(0)
        assert failing.spec.name in caplog.text
        errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert not any(other.spec.name in error for error in errors), errors
        assert len(list(tmp_path.glob("journal-0/*/clean"))) == 2, "the journals are not marked as whole"
        pods.start(0)
        for training in (failing, other):
            training.ask(0, 0)
            training.check(0)


def test_idle_jobs_are_removed_when_one_of_them_fails(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with PodsInProcess(1, tmp_path, journal=False, job_idle_seconds=4) as pods:
        jobs = pods.node(0).jobs
        failing = Training(pods, spec_of(packed, world_size=1), NUM_SAMPLES)
        monkeypatch.setattr(jobs[failing.spec.name].job.dataset, "close", fails)
        other = Training(pods, spec_of(packed, world_size=1), NUM_SAMPLES)
        said = f"job {failing.spec.name}, which is idle, was not removed: its dataset can't be closed"
        until(lambda: said in caplog.text, "the failure in the log")
        until(lambda: not jobs, "the end of both idle jobs")
        assert f"job {other.spec.name}, which" not in caplog.text
