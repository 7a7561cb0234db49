"""Which plan does a job get? One, for all of its ranks, whoever is away and whoever reaches whom as it begins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.membership.planned_in_process import Run, new_name
from tests.membership.pods_in_process import Packed, PodsInProcess
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until

from refill.errors import JobConflict, PodUnreachable


@pytest.mark.parametrize(("num_pods", "gone"), [(3, [0]), (5, [0, 1])], ids=["3", "5"])
def test_a_job_begins_while_less_than_half_of_the_pods_are_away(packed: Packed, num_pods: int, gone: list[int]) -> None:
    with PodsInProcess(num_pods) as pods:
        pods.kill(*gone)
        run = Run(pods, packed[0], new_name(), 2, first_pod=num_pods - 1)
        run.take(0, 0, 100)
        pods.start(*gone)
        run.take(0, 100)
        run.take(1)
        run.check(packed[0])
        for epoch in range(2):
            run.exact_receipt(epoch)


def test_no_job_begins_while_half_of_the_pods_are_away(packed: Packed) -> None:
    with PodsInProcess(4) as pods:
        pods.kill(0, 1)
        with pytest.raises(PodUnreachable, match="while half of the pods or more can't say whether it has one"):
            Run(pods, packed[0], new_name(), 1, first_pod=3, timeout_seconds=3).take(0, 0, 50)


def test_the_first_pod_makes_the_plan_though_only_others_reach_it(packed: Packed) -> None:
    """Pod 2, at which the rank registers, has other memory, and would make another plan."""
    with PodsInProcess(3) as pods:
        pods.kill(2)
        pods.settings["memory_bytes"] = "2MiB"
        pods.start(2)
        before = Run(pods, packed[0], new_name(), 1, memory_bytes=0)
        before.take(0, 0, 50)
        before.ranks[0].end_job()
        apart = pods.rule("/peer/", to=0, by=2, times=-1)
        run = Run(pods, packed[0], new_name(), 1, first_pod=2, memory_bytes=0)
        run.take(0, 0, 50)
        assert apart.seen
        assert {pods.get(pod, f"/v1/jobs/{run.name}")["plan_id"] for pod in range(3)} == {run.plan.plan_id}
        assert run.plan == before.plan


def test_a_pod_that_few_find_away_is_not_passed_over(packed: Packed) -> None:
    """Of four pods, two don't hear the question whether pod 0 is away."""
    with PodsInProcess(4) as pods:
        pods.kill(0)
        deaf = [pods.rule("/made_by/", to=pod, times=-1) for pod in (1, 2)]
        with pytest.raises(PodUnreachable, match="pod 0 is to make it and can't be reached"):
            Run(pods, packed[0], new_name(), 1, first_pod=3, timeout_seconds=3).take(0, 0, 50)
        assert all(rule.seen for rule in deaf)


def test_nobody_begins_by_a_plan_that_few_pods_were_told_of(packed: Packed) -> None:
    """It may be lost with these, or be unknown where another one is made."""
    with PodsInProcess(3) as pods:
        untold = pods.rule("PUT /peer/", by=0, times=-1)
        run = Run(pods, packed[0], new_name(), 1, timeout_seconds=3)
        with pytest.raises(PodUnreachable, match="does not begin while half of the pods or more can't be told of it"):
            run.take(0, 0, 50)
        assert untold.seen
        assert not pods.node(0).planned.jobs
        untold.times = 0
        run.take(0)
        run.check(packed[0])
        run.exact_receipt(0)


@pytest.mark.parametrize("received", [True, False], ids=["received", "registered"])
def test_two_pods_that_both_make_a_plan_come_to_one(packed: Packed, received: bool) -> None:
    """Pod 0 has other memory. It reaches the others, which don't reach it; while it is about to tell them of its plan,
    to two ranks that have registered there, the others make one."""
    with PodsInProcess(3) as pods:
        pods.kill(0)
        pods.settings["memory_bytes"] = "2MiB"
        pods.start(0)
        apart = pods.rule("/peer/", to=0, times=-1)
        told = pods.rule("PUT /peer/", by=0, times=-1, held=pods.event())
        name = new_name()
        runs = [Run(pods, packed[0], name, 3, first_pod=home, memory_bytes=0) for home in (0, 1, 0)]
        with ThreadPoolExecutor(2) as threads:
            begun = [threads.submit(runs[rank].take, 0, 0, 50, [rank]) for rank in (0, 2)]
            until(lambda: told.seen == 2, "pod 0 tells the others")
            runs[1].take(0, 0, 50 * received, [1])
            plan = runs[1].plan
            assert pods.get(0, f"/v1/jobs/{name}")["plan_id"] != plan.plan_id
            told.times = apart.times = 0
            assert told.held is not None
            pods.set(told.held)
            for each in begun:
                each.result(60)
        for rank, first in enumerate((50, 50 * received, 50)):
            runs[rank].take(0, first, ranks=[rank])
        assert len({run.ranks[rank].plan_id for rank, run in enumerate(runs)}) == 1
        assert not received or runs[0].plan == plan
        came = [each for run in runs for each in run.came]
        assert len({place for _, place, _ in came}) == len({sample for _, _, sample in came}) == NUM_SAMPLES


def begun_by_two_plans(pods: PodsInProcess, packed: Packed) -> tuple[Run, Run]:
    """All pods have lost the job, and have other memory now: a rank that is fresh gets another plan than one that goes
    on. Returns the run that has received 40 samples of each rank, and the fresh one."""
    run = Run(pods, packed[0], new_name(), 2, memory_bytes=0)
    run.take(0, 0, 40)
    pods.kill(0, 1)
    pods.settings["memory_bytes"] = "2MiB"
    pods.start(0, 1)
    fresh = Run(pods, packed[0], run.name, 2, memory_bytes=0)
    assert fresh.plan != run.plan, "pods would plan otherwise now"
    return run, fresh


def test_plans_that_contradict_each_other_are_refused_by_name(packed: Packed) -> None:
    """The rank that is fresh is the first to ask."""
    with PodsInProcess(2) as pods:
        run, fresh = begun_by_two_plans(pods, packed)
        fresh.take(0, 0, 20, ranks=[0])
        with pytest.raises(JobConflict, match=rf"by plan {fresh.plan.plan_id:.8}, and you go on by plan") as refused:
            run.take(0, 40, 60, ranks=[1])
        assert "\n" not in str(refused.value)
        pods.kill(1)
        pods.start(1)
        with pytest.raises(JobConflict, match="ranks of one run must go on from states of one run"):
            run.take(0, 40, 60, ranks=[1])  # by way of a pod that has heard of neither
        assert pods.get(0, f"/v1/jobs/{run.name}")["plan_id"] == fresh.plan.plan_id, "who is refused has ended the job"
        fresh.take(0, 20, 40)
        fresh.check(packed[0])


def test_a_plan_that_nobody_has_received_anything_by_gives_way(packed: Packed) -> None:
    with PodsInProcess(2) as pods:
        run, fresh = begun_by_two_plans(pods, packed)
        run.take(0, 40, 60)
        fresh.take(0, 0, 20, ranks=[])
        assert pods.get(1, f"/v1/jobs/{run.name}")["plan_id"] == run.plan.plan_id
        run.take(0, 60)
        run.check(packed[0])
        run.exact_receipt(0)


def test_no_plan_is_made_while_half_of_the_pods_may_know_one(packed: Packed) -> None:
    """Pod 0 comes back with other memory, and is cut off from the other while a rank registers: the rank waits."""
    with PodsInProcess(2) as pods:
        run = Run(pods, packed[0], new_name(), 2, memory_bytes=0)
        pods.kill(0)
        pods.settings["memory_bytes"] = "2MiB"
        pods.start(0)
        pods.rule("/planned", to=1, times=2)
        fresh = Run(pods, packed[0], run.name, 2, memory_bytes=0)
        assert fresh.plan == run.plan
        run.take(0, 0, 40, ranks=[1])
        fresh.take(0, 0, 40, ranks=[0])
        both = [*run.came, *fresh.came]
        assert len({place for _, place, _ in both}) == len({sample for _, _, sample in both}) == 80


def test_two_plans_that_nobody_has_received_anything_by_become_one(packed: Packed) -> None:
    """Two of three pods come back with other memory, and are cut off from the third while a rank registers."""
    with PodsInProcess(3) as pods:
        run = Run(pods, packed[0], new_name(), 2, memory_bytes=0)
        pods.kill(0, 2)
        pods.settings["memory_bytes"] = "2MiB"
        pods.start(0, 2)
        pods.rule("/planned", to=1, times=3)
        fresh = Run(pods, packed[0], run.name, 2, memory_bytes=0)
        run.take(0, 0, 40, ranks=[1])
        fresh.take(0, 0, 40, ranks=[0])
        assert run.ranks[1].plan_id == fresh.ranks[0].plan_id
        both = [*run.came, *fresh.came]
        assert len({place for _, place, _ in both}) == len({sample for _, _, sample in both}) == 80
