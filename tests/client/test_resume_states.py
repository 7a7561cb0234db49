"""What a state of the loop says, and which states are refused."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from tests.client.conftest import NUM_SAMPLES
from tests.client.fake_pod import FakePod
from tests.client.loops import DatasetOf, ids_of, iterable, mapped

from refill import Position
from refill.errors import InvalidInput, JobLost


@pytest.fixture
def state(dataset_of: DatasetOf) -> dict[str, Any]:
    loader, _ = mapped(dataset_of, rank=0, world_size=2)
    next(iter(loader))
    found: dict[str, Any] = loader.state_dict()
    return found


def test_a_state_is_small_and_plain(state: dict[str, Any]) -> None:
    assert state == {
        "version": 1,
        "job": "job",
        "dataset": "file:///data",
        "incarnation": "1",
        "world_size": 2,
        "rank": 0,
        "epoch": 0,
        "position": 6,
        "length": 20,
    }


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"job": "another"}, "the state is of job 'another', not 'job'"),
        ({"dataset": "s3://b/x"}, "the state is of dataset 's3://b/x', not 'file:///data'"),
        ({"world_size": 4}, "saved with world_size 4, and this job has 2"),
        ({"position": 21}, "position 21 is past the end of epoch 0, which has 20 positions"),
        ({"length": 30}, "counts 30 samples of rank 0 in an epoch, and there are 20"),
        ({"position": -1}, "position must be a number of at least 0, got -1"),
        ({"position": 1.5}, "position must be a number"),
        ({"epoch": True}, "epoch must be a number"),
        ({"epoch": None}, "epoch must be a number"),
        ({"epoch": 2**31}, "epoch must be"),
        ({"job": 3}, "job must be a text"),
        ({"listed": 3}, "listed must be a length and a digest, got 3"),
        ({"listed": [3, "x"]}, "listed must be a length and a digest"),
        ({"listed": [-1, "0" * 32]}, "listed must be a number"),
        ({"version": 2}, "the state has version 2, and this refill reads version 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_states_are_refused_in_one_line(
    dataset_of: DatasetOf, state: dict[str, Any], change: dict[str, Any], why: str
) -> None:
    loader, sampler = mapped(dataset_of, rank=0, world_size=2)
    with pytest.raises(InvalidInput, match=why) as caught:
        loader.load_state_dict(state | change)
    assert "\n" not in str(caught.value)
    assert next(iter(sampler)) == Position(0, 0), "what is refused changes nothing"


@pytest.mark.parametrize(
    ("garbage", "why"),
    [
        (None, "got NoneType"),
        ([1, 2], "got list"),
        ({}, "has no 'version'"),
        ({"version": 1}, "job must be a text, got None"),
        ({"_snapshot": {}}, "of torchdata's StatefulDataLoader: load it there"),
    ],
)
def test_what_is_no_state_is_refused(dataset_of: DatasetOf, garbage: Any, why: str) -> None:
    loader, _ = mapped(dataset_of)
    with pytest.raises(InvalidInput, match=why):
        loader.load_state_dict(garbage)
    stream, _ = iterable(dataset_of)
    with pytest.raises(InvalidInput, match=why):
        stream.load_state_dict(garbage)


def test_a_state_is_not_loaded_within_the_loop(dataset_of: DatasetOf) -> None:
    loader, _ = mapped(dataset_of)
    state = loader.state_dict()
    for _ in loader:
        with pytest.raises(InvalidInput, match="before the loop begins"):
            loader.load_state_dict(state)
    loader.load_state_dict(state)


def test_pods_that_lost_the_job_can_not_go_on_midway(pod: FakePod, dataset_of: DatasetOf) -> None:
    states = []
    loader, _ = mapped(dataset_of)
    for _ in loader:
        states.append(loader.state_dict())
    dataset_of(resume=states[2]).register()
    pod.restart()
    loader, sampler = mapped(dataset_of)
    with pytest.raises(
        JobLost,
        match=r"registered anew since .*without CacheDataset\(.*resume=state\), .* \(set_epoch\(0\)\); policy plan",
    ):
        loader.load_state_dict(states[2])
    loader.load_state_dict(states[-1])
    assert sampler.epoch == 1, "at the end of an epoch there is nothing to know"
    with pytest.raises(JobLost, match="pod 0 was restarted, and policy redox keeps who got what only in memory"):
        dataset_of(resume=states[2]).register()
    dataset_of(resume=states[-1]).register()
    assert pod.registered_by == [None, "1", None, "1", None]


def test_a_fixed_order_goes_on_whatever_the_pods_know(pod: FakePod, dataset_of: DatasetOf) -> None:
    loader, _ = mapped(dataset_of, shuffle=False)
    consumed = ids_of(islice(loader, 2))
    state = loader.state_dict()
    pod.restart()
    loader, _ = mapped(dataset_of, shuffle=False)
    loader.load_state_dict(state)
    assert consumed + ids_of(loader) == list(range(NUM_SAMPLES))
