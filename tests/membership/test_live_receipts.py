"""Receipts of live jobs: of a running epoch, of pods that were asked for nothing, and of runs that have ended, which
the next pod keeps, too."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.membership.pods_in_process import Packed, PodsInProcess, Rank, Training, spec_of
from tests.pod_fixtures import NUM_SAMPLES, write_files

from refill.errors import UnknownJob
from refill_service.datasets.pack import pack

EXACT = {"delivered": NUM_SAMPLES, "duplicates": 0, "missing": 0, "exact": True}


def counts_of(receipt: dict[str, Any]) -> dict[str, Any]:
    return {name: receipt[name] for name in EXACT}


def test_receipts_and_counts_outlive_the_job_and_a_pod(packed: Packed) -> None:
    with PodsInProcess(3) as pods:
        training = Training(pods, spec_of(packed[0]), NUM_SAMPLES)
        for epoch in range(5):
            training.all_ask(epoch)
        before = [training.receipt(epoch) for epoch in range(5)]
        counted = training.ranks[0].epoch_counts(1)
        training.ranks[0].end_job()
        for epoch in range(5):
            for pod in range(3):
                assert training.receipt(epoch, pod) == before[epoch] | {"ended": True}, f"epoch {epoch} of pod {pod}"
        assert training.ranks[1].epoch_counts(1) == counted | {"ended": True}
        observer = Rank(pods, training.spec, 0)
        assert observer.epoch_counts(1)["total"] == counted["total"]
        assert pods.get(0, "/v1/jobs") == [], "looking at a job that has ended has registered it"
        with pytest.raises(UnknownJob, match=r"epoch 7 of job .* has not begun"):
            training.receipt(7)
        runs: Any = pods.get(1, "/v1/runs")
        (run,) = runs
        assert (run["job"], run["first_epoch"], run["last_epoch"]) == (training.spec.name, 0, 4)
        pods.kill(1)
        pods.start(1)
        assert counts_of(training.receipt(4, 1)) == EXACT, "a pod that was restarted has its neighbour's copy"
        pods.kill(1, 2)
        pods.start(1, 2)
        with pytest.raises(UnknownJob, match=r"what pod 1 delivered in epoch 4 .* is no longer known"):
            training.receipt(4)


def test_each_run_of_a_name_keeps_its_own(packed: Packed) -> None:
    with PodsInProcess(2) as pods:
        spec = spec_of(packed[0])
        first = Training(pods, spec, NUM_SAMPLES)
        first.all_ask(0)
        run = first.receipt(0)["run"]
        first.ranks[0].end_job()
        second = Training(pods, spec, NUM_SAMPLES, process=2)
        second.all_ask(0, 0, 100)
        path = f"/v1/jobs/{spec.name}/epochs/0/receipt"
        assert (second.receipt(0)["exact"], second.receipt(0)["ended"]) == (False, False)
        for name in (run, run[:8]):
            assert pods.get(1, f"{path}?run={name}")["exact"]
        with pytest.raises(UnknownJob, match="no pod knows run 0123456789 of job"):
            pods.get(0, f"{path}?run=0123456789")
        assert first.ranks[0].epoch_counts(0)["run"] == run


def test_who_looked_and_never_asked_leaves_nothing(packed: Packed) -> None:
    with PodsInProcess(2) as pods:
        rank = Rank(pods, spec_of(packed[0]), 0)
        rank.info()
        rank.end_job()
        assert pods.get(0, "/v1/runs") == []
        with pytest.raises(UnknownJob, match="no pod knows job"):
            pods.get(0, f"/v1/jobs/{rank.spec.name}/epochs/0/receipt")


def test_one_pod_was_not_asked_yet(packed: Packed) -> None:
    with PodsInProcess(2) as pods:
        training = Training(pods, spec_of(packed[0]), NUM_SAMPLES)
        with pytest.raises(UnknownJob, match=r"epoch 0 of job .* has not begun"):
            training.receipt(0)
        training.ask(0, 0, end=1)
        for ended in (False, True):
            if ended:
                training.ranks[0].end_job()
            for pod in (0, 1):
                found = training.receipt(0, pod)
                counts = {"delivered": 1, "duplicates": 0, "missing": NUM_SAMPLES - 1, "exact": False}
                assert counts_of(found) == counts
                assert (found["requests"], found["running"], found["ended"]) == (NUM_SAMPLES, not ended, ended)
                with pytest.raises(UnknownJob, match=r"epoch 1 of job .* has not begun"):
                    training.receipt(1, pod)


def test_an_epoch_that_asks_nothing_of_a_pod(packed: Packed) -> None:
    """As with a sampler that draws from a part of the dataset."""
    part = NUM_SAMPLES // 4
    with PodsInProcess(2) as pods:
        training = Training(pods, spec_of(packed[0], order="explicit"), part)
        for epoch in range(6):
            size = NUM_SAMPLES if epoch % 2 else part
            for rank in training.ranks:
                rank.post_trace(epoch, np.arange(rank.rank, size, 2))
            training.length = size // 2
            training.all_ask(epoch)
        for ended in (False, True):
            if ended:
                training.ranks[0].end_job()
            for epoch in range(6):
                found = training.receipt(epoch, 1)
                assert (found["exact"], found["delivered"]) == (True, NUM_SAMPLES if epoch % 2 else part), epoch


def test_a_pod_owns_nothing(tmp_path: Path) -> None:
    """The dataset has fewer chunks than there are pods."""
    (tmp_path / "files").mkdir()
    write_files(tmp_path / "files", 20)
    asyncio.run(pack(str(tmp_path / "files"), (tmp_path / "store").as_uri()))
    with PodsInProcess(3) as pods:
        training = Training(pods, spec_of((tmp_path / "store").as_uri()), 20)
        for epoch in range(2):
            training.all_ask(epoch)
            training.check(epoch)
        training.ranks[0].end_job()
        training.check(1)
