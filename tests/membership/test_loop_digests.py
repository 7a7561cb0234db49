"""What receipts say of what loops were given: one number, the same for any ranks, workers and pods."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data
from tests.integration.job_ranks import receipt
from tests.membership.planned_in_process import PlannedDataset, PlannedRank, new_name
from tests.membership.pods_in_process import Packed, PodsInProcess
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until, until_answered

import refill
from refill.errors import UnknownJob
from refill.pods.planned_connection import PlannedConnection
from refill_service.cache_core import rank_leases
from refill_service.demo.local_cluster import LocalCluster

PLANNED = {"plan_bytes": 300_000, "shares": 4, "run": 16}


@pytest.fixture(autouse=True)
def silent_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if ranks that others take the place of had been silent for long."""
    monkeypatch.setattr(rank_leases, "LEASE_SECONDS", 0.0)


@pytest.fixture
def pods() -> Iterator[PodsInProcess]:
    with PodsInProcess(2) as found:
        yield found


class Loops:
    """The ranks of a job in step, each with a loader, as training scripts have them."""

    def __init__(
        self, pods: PodsInProcess, packed: Packed, num_ranks: int, states: Any = None, name: str = "", **more: Any
    ) -> None:
        self.pods, self.name = pods, name or new_name()
        self.datasets, self.samplers, self.loaders = [], [], []
        for rank in range(num_ranks):
            resume = None if states is None else states[rank % len(states)]
            given = {"policy_settings": PLANNED, "dataset": packed[0], "job": self.name} | more
            dataset = PlannedDataset(pods, rank=rank, world_size=num_ranks, resume=resume, **given)
            sampler = refill.EpochSampler(dataset)
            loader = torch.utils.data.DataLoader(
                dataset, batch_size=32 // num_ranks, sampler=sampler, collate_fn=_nothing
            )
            self.datasets.append(dataset)
            self.samplers.append(sampler)
            self.loaders.append(refill.timed(loader, dataset))
            if resume is not None:
                self.loaders[-1].load_state_dict(resume)

    def train(self, epoch: int, steps: int = 1 << 30) -> list[dict[str, Any]]:
        """So many steps of an epoch, or to its end. Returns the states of ranks then."""
        for sampler in self.samplers:
            sampler.set_epoch(epoch)
        running: list[Any] = [iter(loader) for loader in self.loaders]
        for _ in range(steps):
            if [next(each, None) for each in running].count(None):
                break
        states = [loader.state_dict() for loader in self.loaders]
        for each in running:
            each.close()
        return states

    def receipt(self, epoch: int, pod: int = 0) -> dict[str, Any]:
        for dataset in self.datasets:
            assert isinstance(dataset.connection, PlannedRank)
            until_answered(dataset.connection.look)
        return self.pods.get(pod, f"/v1/jobs/{self.name}/epochs/{epoch}/receipt")

    def whole(self, epoch: int, pod: int = 0) -> tuple[str, str]:
        """``(plan_id, digest)`` of an epoch that loops had all of."""
        found: dict[str, Any] = {}

        def is_told() -> bool:
            with contextlib.suppress(UnknownJob):  # a pod that has come back is told of it
                found.update(self.receipt(epoch, pod))
            return bool(found.get("digested") == NUM_SAMPLES and found["exact"])

        try:
            until(is_told, "an exact receipt of all that loops had")
        except AssertionError as error:
            raise AssertionError(f"{error}: {found}") from None
        assert found["digest_as_planned"] is True, found
        assert found["digest"] == found["digest_planned"]
        return found["plan_id"], found["digest"]


def _nothing(samples: list[Any]) -> int:
    return len(samples)


def test_runs_on_any_number_of_ranks_have_equal_digests(packed: Packed, pods: PodsInProcess) -> None:
    """On three ranks, two positions are repeated at the end: they count once."""
    found = []
    for num_ranks in (1, 2, 3):
        loops = Loops(pods, packed, num_ranks)
        for epoch in range(2):
            loops.train(epoch)
        found.append([loops.whole(epoch) for epoch in range(2)])
    assert found[1:] == found[:-1], "the digests differ"
    assert found[0][0][1] != found[0][1][1], "two epochs have the same digest"
    assert loops.receipt(0)["repeats"] == 2


def test_other_seeds_have_other_digests(packed: Packed, pods: PodsInProcess) -> None:
    digests = []
    for seed in (1, 2):
        loops = Loops(pods, packed, 1, seed=seed)
        loops.train(0)
        digests.append(loops.whole(0)[1])
    assert digests[0] != digests[1]


@pytest.mark.variants("1")
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.variant), 1])
def test_states_keep_what_loops_had(packed: Packed, pods: PodsInProcess, num_ranks: int) -> None:
    """Two ranks leave an epoch in its middle, having done more than their checkpoints say; two, four or one go on. All
    pods have lost what they were told."""
    once = Loops(pods, packed, 2)
    once.train(0)
    expected = once.whole(0)
    broken = Loops(pods, packed, 2)
    states = broken.train(0, steps=10)
    assert broken.receipt(0)["digested"] == 320
    pods.kill(0, 1)
    pods.start(0, 1)
    resumed = Loops(pods, packed, num_ranks, states, name=broken.name)
    if num_ranks == 1:  # a state of one rank says what that one had
        resumed.train(0)
        found = resumed.receipt(0)
        assert (found["digested"], found["digest_as_planned"]) == (NUM_SAMPLES - 160, True)
        return
    resumed.train(0, steps=5)
    again = Loops(pods, packed, num_ranks, [loader.state_dict() for loader in resumed.loaders], name=broken.name)
    again.train(0)
    assert again.whole(0) == expected


@pytest.mark.variants("within")
@pytest.mark.parametrize(
    ("num_ranks", "steps"),
    [
        pytest.param(2, 1 << 30, id="at the end"),
        pytest.param(4, 0, id="before", marks=pytest.mark.variant),
        pytest.param(4, 5, id="within"),
    ],
)
def test_states_keep_what_loops_had_of_the_epoch_that_they_left(
    packed: Packed, pods: PodsInProcess, num_ranks: int, steps: int
) -> None:
    """Ranks are killed after its end, and pods, too: nobody else knows."""
    broken = Loops(pods, packed, 2)
    broken.train(0)
    states = broken.train(1, steps)
    left = 0 if steps < NUM_SAMPLES else 1
    expected = broken.whole(left)
    pods.kill(0, 1)
    pods.start(0, 1)
    resumed = Loops(pods, packed, num_ranks, [states[rank % 2] for rank in range(num_ranks)], name=broken.name)
    again = Loops(pods, packed, num_ranks, [each.state_dict() for each in resumed.loaders], name=broken.name)
    assert again.whole(left) == expected
    again.train(left + 1)
    again.whole(left + 1)
    again.whole(left)


@pytest.mark.parametrize("num_ranks", [4, pytest.param(1, marks=pytest.mark.variant)])
def test_other_ranks_that_go_on_from_an_epochs_end_leave_its_receipt_as_it_was(
    packed: Packed, pods: PodsInProcess, num_ranks: int
) -> None:
    """They never go through that epoch: how it would be dealt to them is no matter."""
    broken = Loops(pods, packed, 2)
    part_way = broken.train(0, steps=10)
    within = Loops(pods, packed, 4, [part_way[rank % 2] for rank in range(4)], name=broken.name)
    states = within.train(0)
    expected = within.whole(0)
    resumed = Loops(pods, packed, num_ranks, [states[rank] for rank in range(num_ranks)], name=broken.name)
    for turn in range(2):
        for dataset in resumed.datasets:
            assert isinstance(dataset.connection, PlannedRank)
            assert dataset.connection.report_received()
        assert resumed.whole(0) == expected, turn
        resumed.train(1)


def test_what_a_loop_did_after_its_checkpoint_counts_once(packed: Packed, pods: PodsInProcess) -> None:
    broken = Loops(pods, packed, 2)
    states = broken.train(0, steps=10)
    further = Loops(pods, packed, 2, states, name=broken.name)
    further.train(0, steps=10)
    assert further.receipt(0)["digested"] == 640
    again = Loops(pods, packed, 4, states, name=broken.name)  # from the first checkpoint, dealt anew
    again.train(0)
    again.whole(0)


def test_pods_that_lost_what_they_were_told_are_told_again(packed: Packed, pods: PodsInProcess) -> None:
    loops = Loops(pods, packed, 2)
    loops.train(0)
    first = loops.whole(0)
    pods.kill(0, 1)
    pods.start(0, 1)
    assert loops.whole(0, pod=1) == first


def test_a_job_that_has_ended_says_it_still(packed: Packed, pods: PodsInProcess) -> None:
    loops = Loops(pods, packed, 2)
    loops.train(0)
    loops.train(1)
    expected = [loops.whole(epoch) for epoch in range(2)]
    loops.datasets[0].end_job()
    for epoch in range(2):
        found = loops.pods.get(1, f"/v1/jobs/{loops.name}/epochs/{epoch}/receipt")
        assert found["ended"] is True
        assert (found["plan_id"], found["digest"]) == expected[epoch]
        assert found["digest_as_planned"] is True


def test_what_workers_fetched_ahead_is_not_counted(packed: Packed, three_pods: LocalCluster) -> None:
    """Real pods, and a loader with two workers that is left after three batches."""
    name = new_name()
    dataset = refill.CacheDataset(
        three_pods.pod_urls[0],
        dataset=packed[0],
        job=name,
        policy="planned",
        chunk_size=16,
        memory_bytes=600_000,
    )
    sampler = refill.EpochSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, batch_size=20, sampler=sampler, num_workers=2, collate_fn=_nothing)
    timed = refill.timed(loader, dataset)
    batches: Any = iter(timed)
    for _ in range(3):
        next(batches)
    batches.close()
    assert isinstance(dataset.connection, PlannedConnection)
    dataset.connection.report_received()
    found = receipt(three_pods, {"name": name}, 0)
    assert (found["digested"], found["digest_as_planned"]) == (60, True)
    state = timed.state_dict()
    timed.load_state_dict(state)
    assert sum(timed) == NUM_SAMPLES - 60
    dataset.connection.report_received()
    found = receipt(three_pods, {"name": name}, 0)
    assert (found["digested"], found["digest_as_planned"]) == (NUM_SAMPLES, True)
    dataset.end_job()
