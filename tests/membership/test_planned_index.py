"""Pods that hold the index of their shares alone answer as those that hold all of it, for others that are away, too."""

from __future__ import annotations

import numpy as np
import pytest
from tests.membership.planned_in_process import Run, new_name
from tests.membership.pods_in_process import Packed, PodsInProcess
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until

from refill_service.cache_core import record_pieces
from refill_service.planned import job_shares
from refill_service.planned.planned_job import PlannedJob


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dataset of the tests is one that has very many samples."""
    monkeypatch.setattr(record_pieces, "HELD_WHOLE_SAMPLES", 0)


def job_at(pods: PodsInProcess, pod: int, name: str) -> PlannedJob:
    found = pods.node(pod).table.planned[name]
    assert isinstance(found, PlannedJob)
    return found


async def looked(job: PlannedJob) -> None:
    job.shares.look_at_others()


def own_samples(job: PlannedJob) -> list[int]:
    owned = np.flatnonzero(job.shares.owners == job.ordinal).tolist()
    return sorted(sample for number in owned for sample in job.orders.shares.share(number).samples.tolist())


def test_pods_hold_the_index_of_their_shares_and_of_those_they_stand_in_for(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PodsInProcess(3) as pods:
        run = Run(pods, packed[0], new_name(), 2)
        run.take(0, 0, 200)
        held = []
        for pod in range(3):
            job = job_at(pods, pod, run.name)
            held.append(job.records.own.ids(0, len(job.records.own)).tolist())
            assert held[-1] == own_samples(job), f"pod {pod}"
        assert sorted(sample for each in held for sample in each) == list(range(NUM_SAMPLES))
        rooms = [pods.node(pod).index_room.used_bytes for pod in range(3)]
        pods.kill(1)
        run.take(0, 200)
        stood_in = [job_at(pods, pod, run.name) for pod in (0, 2)]
        others = [records for job in stood_in for records in job.records.of_others.values()]
        assert sorted(sample for each in others for sample in each.ids(0, len(each)).tolist()) == held[1]
        pods.start(1)
        run.take(1, 0, 100)
        monkeypatch.setattr(job_shares, "_STANDS_IN_SECONDS", 0.0)

        def let_go() -> bool:
            for job in stood_in:
                pods.do(looked(job))
            return not any(job.records.of_others for job in stood_in)

        until(let_go, "shares of another pod to be let go of")
        assert [pods.node(pod).index_room.used_bytes for pod in (0, 2)] == [rooms[0], rooms[2]]
        run.take(1, 100)
        run.check(packed[0])
        for epoch in (0, 1):
            assert sorted(run.positions_of(epoch)) == list(range(NUM_SAMPLES)), f"epoch {epoch}"
        run.exact_receipt(1, pod=2)


def test_all_pods_lost_and_back(packed: Packed) -> None:
    with PodsInProcess(3) as pods:
        run = Run(pods, packed[0], new_name(), 2)
        run.take(0, 0, 300)
        pods.kill(0, 1, 2)
        pods.start(0, 1, 2)
        run.take(0, 300)
        run.check(packed[0])
        run.exact_receipt(0)


def test_samples_outside_of_an_epoch(packed: Packed) -> None:
    """Any pod answers any of them, whoever has its part of the index."""
    with PodsInProcess(3) as pods:
        run = Run(pods, packed[0], new_name(), 1)
        run.take(0, 0, 40)
        wanted = np.array([NUM_SAMPLES - 1, 0, 7, 500, 7])
        before = [pods.node(pod).index_room.used_bytes for pod in range(3)]
        expected = None
        for pod in range(3):
            found = pods.do(job_at(pods, pod, run.name).samples(wanted))
            payloads = [bytes(payload) for payload in found]
            assert expected in (None, payloads)
            expected = payloads
        assert [pods.node(pod).index_room.used_bytes for pod in range(3)] == before, "they are not kept"


def test_pinned_samples_are_those_of_a_pod(packed: Packed) -> None:
    """What stays on a pod for all jobs is of its shares, so two jobs of a dataset read it once."""
    with PodsInProcess(2, pinned_fraction=0.5) as pods:
        for _ in range(2):
            run = Run(pods, packed[0], new_name(), 1, memory_bytes=300_000)
            run.take(0)
            run.check(packed[0])
        second = [job_at(pods, pod, run.name) for pod in range(2)]
        assert sum(job.counts.owners[0].core.refills_pinned for job in second) > 0
        for pod in range(2):
            (share,) = pods.node(pod).table.pinned.shares
            records = share.parts[0].records
            assert set(records.ids(0, len(records)).tolist()) <= set(own_samples(job_at(pods, pod, run.name)))
