"""Pods without volumes end in order and are replaced while no rank is there: what they knew goes on with others."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from tests.membership.pods_in_process import PodsInProcess, Rank, Training
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until

from refill.protocol.job_spec import JobSpec

Packed = tuple[str, dict[str, bytes]]


def training_of(packed: Packed, pods: PodsInProcess) -> Training:
    name = f"rollout-{uuid.uuid4().hex[:8]}"
    spec = JobSpec(name, packed[0], policy="redox", chunk_size=16, memory_bytes=600_000, world_size=2)
    training = Training(pods, spec, NUM_SAMPLES)
    training.all_ask(0, 0, 200)
    return training


def has_taken_it_up(pods: PodsInProcess, pod: int, training: Training) -> bool:
    at_pod = pods.node(pod).jobs.get(training.spec.name)
    return at_pod is not None and not at_pod.job.life.recovering


def ranks_come_back(training: Training) -> None:
    """As other processes, from a checkpoint, that remember nothing of before."""
    training.ranks = [Rank(training.pods, training.spec, rank, process=2) for rank in range(training.spec.world_size)]


@pytest.mark.parametrize(
    "rollout",
    [[[2], [1], [0]], [[0], [1], [2]], [[2, 1], [0]], [[0, 1], [2]], [[1], [0, 2], [1], [2], [0]]],
    ids=str,
)
def test_pods_are_replaced_while_no_rank_is_there(packed: Packed, tmp_path: Path, rollout: list[list[int]]) -> None:
    """Those of a step end one after another, before the first of them starts again."""
    with PodsInProcess(3, tmp_path, journal=False) as pods:
        training = training_of(packed, pods)
        for step in rollout:
            for pod in step:
                pods.end(pod)
            pods.start(*step)
            for pod in step:
                until(lambda pod=pod: has_taken_it_up(pods, pod, training), f"pod {pod} with the job")  # type: ignore[misc]
        ranks_come_back(training)
        training.all_ask(0, 100)
        training.check(0)
        training.all_ask(1)
        training.check(1)


def test_a_pod_that_crashes_once_it_has_gone_on_is_not_given_what_it_was_left_before(
    packed: Packed, tmp_path: Path
) -> None:
    with PodsInProcess(3, tmp_path, journal=False, recovery_seconds=1) as pods:
        training = training_of(packed, pods)
        pods.end(2)
        pods.start(2)
        until(lambda: has_taken_it_up(pods, 2, training), "pod 2 with the job")
        training.all_ask(0, 200, 300)
        pods.end(0)  # hands on what it has, too
        pods.start(0)
        until(lambda: has_taken_it_up(pods, 0, training), "pod 0 with the job")
        pods.kill(2)
        pods.start(2)
        training.all_ask(0)
        training.check(0)
