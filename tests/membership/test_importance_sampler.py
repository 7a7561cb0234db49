"""Ranks draw their epochs from what all of them found important, and pods keep that."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tests.membership.pods_in_process import Packed, PodsInProcess, Rank
from tests.pod_fixtures import NUM_SAMPLES

import refill
from refill.errors import InvalidInput, JobLost
from refill.pods.pod_connection import PodConnection
from refill.protocol.importance import drawn, rank_scores
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import Int64Array

LENGTH, BATCH = NUM_SAMPLES // 2, 50
LOSSES = np.random.default_rng(5).permutation(NUM_SAMPLES) / NUM_SAMPLES


class CalledDataset(refill.CacheDataset):
    """Pods are called, not asked over a network."""

    def __init__(self, pods: PodsInProcess, rank: int, name: str, url: str, **settings: Any) -> None:
        self._pods_here = pods
        how = {"policy": "exact", "world_size": 2, "memory_bytes": 600_000, "seed": 3} | settings
        super().__init__(pods.pod_urls[0], dataset=url, job=name, rank=rank, **how)

    def _new_connection(self) -> PodConnection:
        return Rank(self._pods_here, JobSpec.from_dict(self._settings), self._rank or 0, run=self._run)


class Training:
    """Two ranks that train in step; a sample's loss is always the same."""

    def __init__(self, pods: PodsInProcess, url: str, **how: Any) -> None:
        self.pods, self.name, self.url, self.how = pods, f"drawn-{uuid.uuid4().hex[:8]}", url, how
        self.begin()

    def begin(self) -> None:
        self.datasets = [CalledDataset(self.pods, rank, self.name, self.url) for rank in (0, 1)]
        self.samplers = [refill.ImportanceSampler(dataset, **self.how) for dataset in self.datasets]

    def over(self) -> None:
        """What was found is reported, as far as pods take it."""
        for thread in threading.enumerate():
            if thread.name == "refill-scores":
                thread.join()

    def draw(self, epoch: int) -> None:
        """At the same time, as ranks do."""
        for sampler in self.samplers:
            sampler.set_epoch(epoch)
        self.positions = run_together(lambda rank: list(self.samplers[rank]))
        for of_rank in self.positions:
            assert [each.position for each in of_rank] == list(range(LENGTH))

    def epoch(self, epoch: int, until: int = LENGTH) -> list[Int64Array]:
        """The samples of each rank, in their order."""
        self.draw(epoch)
        return self.train(until)

    def train(self, until: int = LENGTH, start: int = 0) -> list[Int64Array]:
        found = run_together(lambda rank: self._train(rank, start, until))
        self.over()
        return found

    def _train(self, rank: int, start: int, until: int) -> Int64Array:
        had = []
        for first in range(start, until, BATCH):
            batch = self.datasets[rank].__getitems__(self.positions[rank][first : first + BATCH])
            ids = [sample["__id__"] for sample in batch]
            had += ids
            self.samplers[rank].update(torch.tensor(ids), losses=torch.tensor(LOSSES[ids]))
        return np.array(had)

    def receipt(self, epoch: int) -> dict[str, Any]:
        return self.pods.get(0, f"/v1/jobs/{self.name}/epochs/{epoch}/receipt")


def run_together(work: Any) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, (0, 1)))


@pytest.fixture(scope="module")
def pods() -> Iterator[PodsInProcess]:
    with PodsInProcess(3, memory_bytes="16MiB") as found:
        yield found


def test_ranks_divide_one_drawing_from_the_scores_of_all(pods: PodsInProcess, packed: Packed) -> None:
    training = Training(pods, packed[0])
    first = training.epoch(0)
    of_epoch_0 = drawn(np.full(NUM_SAMPLES, np.nan), np.random.default_rng([3, 0]))
    assert sorted(first[0].tolist() + first[1].tolist()) == sorted(of_epoch_0.tolist())
    training.draw(1)
    scores = training.samplers[0].scores()
    assert np.array_equal(scores, training.samplers[1].scores(), equal_nan=True), "each rank knows what both found"
    trained = np.unique(np.concatenate(first))
    assert np.flatnonzero(~np.isnan(scores)).tolist() == trained.tolist()
    last = {rank: first[rank][-BATCH:] for rank in (0, 1)}
    only_there = [sample for sample in last[0] if np.count_nonzero(np.concatenate(first) == sample) == 1]
    ranked = dict(zip(last[0].tolist(), rank_scores(LOSSES[last[0]]), strict=True))
    assert len(only_there) > 0
    np.testing.assert_allclose([scores[each] for each in only_there], [ranked[each] for each in only_there], rtol=1e-6)


def test_the_receipt_counts_positions(pods: PodsInProcess, packed: Packed, capsys: pytest.CaptureFixture[str]) -> None:
    from refill_service.commands.receipt import _shown

    training = Training(pods, packed[0], repetition=2)
    training.epoch(0)
    training.draw(1)
    assert training.receipt(0)["exact"]
    had = np.concatenate(training.train())
    often = np.bincount(had, minlength=NUM_SAMPLES)
    found = training.receipt(1)
    posted = {"posted": NUM_SAMPLES, "delivered": NUM_SAMPLES, "duplicates": 0, "missing": 0}
    assert found["positions"] == posted
    assert found["draws"] == {
        "distinct": int((often > 0).sum()),
        "never_drawn": int((often == 0).sum()),
        "drawn_once": int((often == 1).sum()),
        "drawn_twice": int((often == 2).sum()),
        "drawn_more": int((often > 2).sum()),
        "most_often": int(often.max()),
    }
    assert found["exact"]
    shown = _shown(found)
    assert "each position was answered once" in shown
    assert "each sample" not in shown
    assert f"never drawn {int((often == 0).sum()):>14,}" in shown


def test_a_receipt_of_half_an_epoch_says_what_is_missing(pods: PodsInProcess, packed: Packed) -> None:
    training = Training(pods, packed[0])
    training.epoch(0, until=100)
    found = training.receipt(0)
    assert found["positions"]["delivered"] == 200
    assert found["positions"]["missing"] == NUM_SAMPLES - 200
    assert (found["exact"], found["running"]) == (False, True)


def test_pods_keep_what_is_important_and_it_comes_first(pods: PodsInProcess, packed: Packed) -> None:
    training = Training(pods, packed[0], repetition=2)
    for epoch in range(3):
        training.epoch(epoch)
    training.draw(3)
    drawn_from = training.samplers[0].drawn_from
    assert drawn_from is not None
    cached = drawn_from[1]
    assert 100 < cached.sum() < 900, "memory is for a part of the dataset"
    scores = training.samplers[0].scores()
    assert np.nanmean(scores[cached]) > np.nanmean(scores[~cached]) + 0.2
    order = training.train()[0]
    counts = training.datasets[0].epoch_counts(3)["total"]
    assert counts["refills"] + counts["exact_reads"] < 0.6 * NUM_SAMPLES, "what is in memory is not read"
    here = cached[order]
    assert here[0]
    assert not here[np.argmin(here) :].any(), "what is in memory comes first"


def test_an_epoch_that_is_lost_starts_over_with_its_checkpoints_scores(pods: PodsInProcess, packed: Packed) -> None:
    training = Training(pods, packed[0])
    training.epoch(0, until=100)
    state = training.samplers[0].state_after(100)
    training.datasets[0].end_job()
    again = Training(pods, packed[0])
    for sampler in again.samplers:
        with pytest.raises(JobLost, match=r"set_epoch\(0\)"):
            sampler.load_state_dict(state | {"job": again.name})
    again.draw(0)
    drawn_from = again.samplers[1].drawn_from
    assert drawn_from is not None
    found = drawn_from[0]
    assert np.array_equal(found, state["sampler"]["scores"].numpy(), equal_nan=True)


def test_a_checkpoint_has_the_scores(pods: PodsInProcess, packed: Packed) -> None:
    training = Training(pods, packed[0])
    training.epoch(0)
    states = [sampler.state_after(LENGTH) for sampler in training.samplers]
    training.draw(1)
    training.datasets[0].end_job()
    again = Training(pods, packed[0])
    for sampler, state in zip(again.samplers, states, strict=True):
        sampler.load_state_dict(state | {"job": again.name, "sampler": states[0]["sampler"]})
    assert [sampler.epoch for sampler in again.samplers] == [1, 1]
    run_together(lambda rank: list(again.samplers[rank]))
    of_rank_0 = states[0]["sampler"]["scores"].numpy()
    for sampler in again.samplers:
        assert sampler.drawn_from is not None
        assert np.array_equal(sampler.drawn_from[0], of_rank_0, equal_nan=True), "the pods of the new job know them"


def test_while_validation_improves_each_rank_takes_what_is_most_important(pods: PodsInProcess, packed: Packed) -> None:
    training = Training(pods, packed[0])
    training.epoch(0)
    for accuracy, improving in ((0.5, True), (0.5, False), (0.7, True)):
        for sampler in training.samplers:
            sampler.validated(accuracy)
            assert sampler.improving is improving
    had = training.epoch(1)
    for of_rank in had:
        assert np.bincount(of_rank).max() > 2
        assert len(np.unique(of_rank)) < 300, "few, and those often"
    assert training.receipt(1)["exact"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "update takes logits and labels, or losses"),
        ((torch.zeros(2, 3),), "update takes logits and labels, or losses"),
        ((None, None, torch.zeros(3)), r"a batch of 2 samples has losses of shape \(3,\)"),
        ((None, None, torch.tensor(0.5)), r"has losses of shape \(\): give one for each sample"),
    ],
)
def test_what_update_refuses(pods: PodsInProcess, packed: Packed, given: tuple[Any, ...], message: str) -> None:
    sampler = refill.ImportanceSampler(CalledDataset(pods, 0, "refuses", packed[0]))
    logits, labels, losses = (*given, None, None, None)[:3]
    with pytest.raises(InvalidInput, match=message):
        sampler.update(torch.tensor([1, 2]), logits, labels, losses=losses)
    with pytest.raises(InvalidInput, match="there is no sample 1000; the dataset has samples 0 to 999"):
        sampler.update([1000], losses=[0.5])


def test_a_job_of_another_policy_takes_no_scores(pods: PodsInProcess, packed: Packed) -> None:
    with pytest.raises(InvalidInput, match="policy='exact' contradicts the dataset"):
        refill.ImportanceSampler(CalledDataset(pods, 0, "other", packed[0], policy="redox"))
    with pytest.raises(InvalidInput, match="eviction='lru' contradicts ImportanceSampler"):
        refill.ImportanceSampler(
            CalledDataset(pods, 0, "other", packed[0], policy="exact", policy_settings={"eviction": "lru"})
        )
    rank = Rank(pods, JobSpec(f"no-scores-{uuid.uuid4().hex[:8]}", packed[0], memory_bytes=600_000, policy="redox"), 0)
    rank.info()
    with pytest.raises(InvalidInput, match="takes no scores: its policy must be exact with eviction importance"):
        rank.report_scores(np.array([1]), np.array([1.0], dtype=np.float32))
    with pytest.raises(InvalidInput, match="takes no scores"):
        rank.drawn_from(0, NUM_SAMPLES)
