"""Receipts last: after a job has ended, after pods were restarted and nobody has registered it, for its own team."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.membership.pods_in_process import PodsInProcess, Rank, Training
from tests.pod_fixtures import NUM_SAMPLES

from refill.errors import InvalidInput, JobLost, UnknownJob
from refill.protocol.job_spec import JobSpec

Packed = tuple[str, dict[str, bytes]]
EXACT = {"delivered": NUM_SAMPLES, "duplicates": 0, "missing": 0, "unknown": 0, "exact": True}


def spec_of(packed: Packed, **settings: Any) -> JobSpec:
    name = f"ended-{uuid.uuid4().hex[:8]}"
    how = {"policy": "redox", "chunk_size": 16, "memory_bytes": 600_000, "world_size": 2}
    return JobSpec(name, packed[0], **(how | settings))


def counts_of(receipt: dict[str, Any]) -> dict[str, Any]:
    return {name: receipt[name] for name in EXACT}


@pytest.mark.parametrize("journal", [True, False], ids=["journal", "no journal"])
def test_receipts_and_counts_outlive_the_job(packed: Packed, tmp_path: Path, journal: bool) -> None:
    with PodsInProcess(3, tmp_path, journal=journal) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
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
        with pytest.raises(InvalidInput, match=r"epoch 7 of job .* has not begun"):
            training.receipt(7)
        (run,) = pods.get(1, "/v1/runs")
        assert (run["job"], run["first_epoch"], run["last_epoch"]) == (training.spec.name, 0, 4)
        pods.kill(1)
        pods.start(1)
        assert counts_of(training.receipt(4, 1)) == EXACT, "a pod that was restarted has its neighbour's copy"
        if journal:
            pods.kill(0, 1, 2)
            pods.start(0, 1, 2)
            assert training.receipt(3) == before[3] | {"ended": True}
        else:
            pods.kill(1, 2)
            pods.start(1, 2)
            with pytest.raises(UnknownJob, match=r"what pod 1 delivered in epoch 4 .* not known any more"):
                training.receipt(4)


@pytest.mark.parametrize("order", ["keyed", "explicit"])
def test_receipts_are_had_after_a_restart_before_anybody_registers_the_job(
    packed: Packed, tmp_path: Path, order: str
) -> None:
    with PodsInProcess(2, tmp_path, journal=True) as pods:
        training = Training(pods, spec_of(packed, order=order), NUM_SAMPLES)
        for epoch in range(4):
            if order == "explicit":
                for rank in training.ranks:
                    rank.post_trace(epoch, np.arange(rank.rank, NUM_SAMPLES, 2))
            training.all_ask(epoch, end=400 if epoch == 3 else None)
        before = [training.receipt(epoch) for epoch in range(4)]
        pods.kill(0, 1)
        pods.start(0, 1)
        for epoch in range(4):
            found = training.receipt(epoch)
            assert found["digest"] == before[epoch]["digest"]
            # What was sent ahead in the running epoch was given to somebody, as far as journals know.
            assert counts_of(found) == counts_of(before[epoch]) or epoch == 3
        assert (found["running"], found["ended"]) == (True, False)
        assert pods.get(0, "/v1/jobs") == []
        assert training.ranks[0].epoch_counts(0)["total"]["takes"] == NUM_SAMPLES, "what was written down at its end"
        training.all_ask(3)
        assert [training.receipt(epoch)["digest"] for epoch in range(3)] == [each["digest"] for each in before[:3]]
        pods.kill(1)
        pods.start(1)
        training.ask(0, 3)
        pods.kill(0)
        pods.start(0)  # and pod 1 has the job
        assert counts_of(training.receipt(3)) == EXACT
        training.ranks[0].end_job()
        assert counts_of(training.receipt(3)) == EXACT


def test_each_run_of_a_name_keeps_its_own(packed: Packed, tmp_path: Path) -> None:
    with PodsInProcess(2, tmp_path, journal=False) as pods:
        spec = spec_of(packed)
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


def test_who_looked_and_never_asked_leaves_nothing(packed: Packed, tmp_path: Path) -> None:
    with PodsInProcess(2, tmp_path, journal=True) as pods:
        rank = Rank(pods, spec_of(packed), 0)
        rank.info()
        rank.end_job()
        assert pods.get(0, "/v1/runs") == []
        with pytest.raises(UnknownJob, match="no pod knows job"):
            pods.get(0, f"/v1/jobs/{rank.spec.name}/epochs/0/receipt")


@pytest.mark.parametrize("others", [{}, {"seed": 7}], ids=["", "with other settings"])
def test_the_name_is_free_though_a_pod_that_was_not_there_has_a_journal(
    packed: Packed, tmp_path: Path, others: dict[str, int]
) -> None:
    """There were fewer pods when the job ended. The third comes back with its volume."""
    with PodsInProcess(3, tmp_path, journal=True) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        training.all_ask(0, 0, 100)
        pods.scale(2)
        training.all_ask(0, 100, 200)
        training.ranks[0].end_job()
        pods.scale(3)
        again = Training(pods, replace(training.spec, **others), NUM_SAMPLES, process=2)  # type: ignore[arg-type]
        again.all_ask(0)
        again.check(0)


@pytest.mark.parametrize("known", ["running", "in journals"])
def test_pods_are_killed_while_a_job_is_ended(packed: Packed, tmp_path: Path, known: str) -> None:
    """Between any two of its steps a pod has either the journal or the receipts."""
    with PodsInProcess(2, tmp_path, journal=True) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        for epoch in range(4):
            training.all_ask(epoch, end=400 if epoch == 3 else None)
        before = [training.receipt(epoch) for epoch in range(4)]
        if known == "in journals":
            pods.kill(0, 1)
            pods.start(0, 1)
        for pod in (0, 1):
            table = pods.node(pod).table
            table.kept_parts.put = killed  # type: ignore[method-assign]
            with pytest.raises(ValueError, match="killed here"):
                pods.do(table.remove(training.spec.name, ""))
        pods.kill(0, 1)
        pods.start(0, 1)
        for epoch in range(4):
            found = training.receipt(epoch)
            assert (found["ended"], found["digest"]) == (True, before[epoch]["digest"])
            # What was sent ahead in the running epoch was given to somebody, as far as journals know.
            assert counts_of(found) == counts_of(before[epoch]) or epoch == 3
        assert list(tmp_path.glob("journal-*/ending*")) == []
        with pytest.raises(JobLost, match="was ended"):
            training.ask(0, 3, 400, 420)


def killed(part: object) -> None:
    raise ValueError("the pod is killed here")
