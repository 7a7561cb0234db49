"""Redirection within a class: batches as composed, each sample once, bytes read once, no class that can not be had."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache_core.cluster_model import ClusterModel, Shape, run_epoch, shapes

from refill.errors import InvalidInput
from refill.protocol.classes import MOST_CLASSES, entries_of, ids_of
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.class_demand import ClassDemand
from refill_service.cache_core.epoch_order import ExplicitTraces, check_ids
from refill_service.cache_core.home_machine import HomeMachine
from refill_service.cache_core.moved_epoch import moved_traces
from refill_service.cache_core.policies.drain import KIND, DrainPolicy
from refill_service.cache_core.policies.drain_within_classes import DrainWithinClasses
from refill_service.cache_core.policies.interface import EpochBegan
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout, Int64Array
from refill_service.planning.lockstep import LocalOwner, epoch_in_lockstep


def traces_of(classes: Int64Array, order: list[Int64Array]) -> ExplicitTraces:
    return ExplicitTraces(len(classes), {rank: entries_of(ids, classes[ids]) for rank, ids in enumerate(order)})


@st.composite
def epochs(draw: st.DrawFn) -> tuple[Shape, Int64Array, ExplicitTraces]:
    """Any number of classes, most of them rare or not; any order; some samples are left out, some come again."""
    shape = draw(shapes())
    random = np.random.default_rng(shape.seed)
    weights = random.random(draw(st.integers(2, 12))) ** draw(st.sampled_from([0, 1, 8])) + 1e-3
    classes = 5 + random.choice(len(weights), shape.num_samples, p=weights / weights.sum())
    ids = random.permutation(shape.num_samples)
    if draw(st.booleans()):
        ids = ids[np.argsort(classes[ids], kind="stable")]  # one class after another
    if draw(st.booleans()):
        ids = np.concatenate([ids[: len(ids) // 2], ids[: len(ids) // 4]])
    order = [ids[rank :: shape.num_ranks] for rank in range(shape.num_ranks)]
    return shape, classes, traces_of(classes, order)


def check_answers(model: ClusterModel, classes: Int64Array) -> None:
    """Every position was answered, by a sample of its class, and each came as often as it was asked for."""
    asked: Counter[int] = Counter()
    for rank in range(model.shape.num_ranks):
        ids, _ = model.traces.asked(rank, np.arange(model.traces.length(rank)))
        asked.update(ids.tolist())
        got = [model.answers[rank, position] for position in range(len(ids))]
        assert classes[got].tolist() == classes[ids].tolist(), f"batches of rank {rank} are not composed as asked"
    assert Counter(model.answers.values()) == asked


class Watched(ClusterModel):
    """No more is held than there is memory for; but one chunk where there is nothing else."""

    def ask(self, rank: int, positions: np.ndarray, lose: float = 0.0) -> None:
        super().ask(rank, positions, lose)
        for owner in self.owners:
            assert isinstance(owner, (DrainWithinClasses, DrainPolicy))
            most = max(self.shape.capacity_bytes, self.shape.chunk_size * int(self.lengths.max()))
            assert owner.held_bytes <= most, "more is held than there is memory for"


@settings(max_examples=60, deadline=None)
@given(epochs())
def test_batches_are_composed_as_asked_and_bytes_read_once(epoch: tuple[Shape, Int64Array, ExplicitTraces]) -> None:
    shape, classes, traces = epoch
    model = Watched(shape_of_drain(shape), traces)
    run_epoch(model)
    check_answers(model, classes)
    counts = [owner.counts for owner in model.owners]
    members = traces.members(0, shape.num_samples)
    assert members is not None
    assert sum(count.bytes_filled for count in counts) == model.lengths[members].sum(), "a sample was read twice"
    assert all(owner.finished and owner.held_bytes == 0 for owner in model.owners)
    if members.all():
        assert sum(count.bytes_wasted for count in counts) == 0


@settings(max_examples=40, deadline=None)
@given(epochs(), st.floats(0, 0.4), st.floats(0, 0.4))
def test_whatever_is_lost_or_fails(epoch: tuple[Shape, Int64Array, ExplicitTraces], lose: float, fail: float) -> None:
    shape, classes, traces = epoch
    model = ClusterModel(shape_of_drain(shape), traces)
    run_epoch(model, lose=lose, fail=fail)
    check_answers(model, classes)


def shape_of_drain(shape: Shape) -> Shape:
    return Shape(**(vars(shape) | {"policy": "drain"}))


@settings(max_examples=40, deadline=None)
@given(epochs(), st.integers(1, 3))
def test_a_job_that_moves_keeps_the_composition(
    epoch: tuple[Shape, Int64Array, ExplicitTraces], num_moves: int
) -> None:
    """What is left is dealt within classes, and owners of another number of pods have what is asked of them."""
    shape, classes, traces = epoch
    random = np.random.default_rng(shape.seed)
    model = ClusterModel(shape_of_drain(shape), traces)
    received: dict[int, dict[int, int]] = {rank: {} for rank in range(shape.num_ranks)}
    for move in range(num_moves + 1):
        for rank in range(shape.num_ranks):
            positions = np.arange(model.traces.length(rank))
            if move < num_moves:
                positions = positions[random.random(len(positions)) < 0.3]
            for start in range(0, len(positions), shape.batch):
                model.ask(rank, positions[start : start + shape.batch])
                model.some_reads_end()
            received[rank] |= {at: sample for (of, at), sample in model.answers.items() if of == rank}
        if move < num_moves:
            columns = {
                rank: (np.array([*had], dtype=np.int64), np.array([*had.values()], dtype=np.int64))
                for rank, had in received.items()
            }
            dealt = moved_traces(traces, shape.num_ranks, shape.num_samples, columns, f"move {move}")
            traces = ExplicitTraces(shape.num_samples, dealt)
            moved = Shape(**(vars(model.shape) | {"num_pods": int(random.integers(1, 5)), "seed": shape.seed + move}))
            model = ClusterModel(moved, traces, np.concatenate([samples for _, samples in columns.values()]))
            model.answers = {(rank, at): sample for rank, had in received.items() for at, sample in had.items()}
    check_answers(model, classes)


def run(classes: Int64Array, order: list[Int64Array], *, memory: float, chunk_size: int = 8) -> dict[str, float]:
    """Ranks in step, one pod for each; samples of one byte."""
    num_samples, num_pods = len(classes), len(order)
    layout, traces = ChunkLayout(np.array([0, num_samples]), chunk_size), traces_of(classes, order)
    owners = []
    for pod in range(num_pods):
        share = layout.share(pod, num_pods)
        lengths = np.ones(share.num_samples, dtype=np.int64)
        mapping = AbstractMapping(share, max(1, int(memory * share.num_chunks)))
        capacity = int(memory * share.num_samples)
        owners.append(LocalOwner("drain", mapping, [traces], num_pods, lengths, capacity, window=1000, key=str(pod)))
    bounds = layout.owner_bounds(num_pods)
    homes: list[HomeMachine[int]] = [HomeMachine(pod, bounds, num_samples // 50) for pod in range(num_pods)]
    came: Counter[int] = Counter()
    for rank, positions, samples in epoch_in_lockstep(owners, homes, traces, 16):
        assert (classes[samples] == classes[traces.asked(rank, positions)[0]]).all()
        came.update(samples.tolist())
    assert set(came.values()) == {1}
    assert len(came) == num_samples
    counts = [owner.counts for owner in owners]
    return {
        "reads": sum(count.samples_read for count in counts) / num_samples,
        "gets": sum(count.refills for count in counts) / layout.num_chunks,
        "misses": sum(count.misses for count in counts) / num_samples,
    }


NUM_SAMPLES = 3 * 16 * 64


def shuffled(seed: int) -> Int64Array:
    return np.random.default_rng(seed).permutation(NUM_SAMPLES)


def test_rare_classes_cost_nothing() -> None:
    """When they are needed is known: the chunk with the rare one is read in time, and the rest of it is for others."""
    classes = np.ones(NUM_SAMPLES, dtype=np.int64)
    classes[shuffled(1)[:40]] = 2
    classes[shuffled(2)[:3]] = 3
    found = run(classes, [shuffled(3)[rank::3] for rank in range(3)], memory=0.1)
    assert found == {"reads": 1, "gets": 1, "misses": 0}


def test_one_class_after_another_costs_requests_and_no_bytes() -> None:
    classes = 1 + shuffled(1) % 8
    ids = np.argsort(classes, kind="stable")
    found = run(classes, [ids[rank::3] for rank in range(3)], memory=0.1)
    assert found["reads"] == 1
    assert 2 < found["gets"] < 8
    assert found["misses"] < 0.01, "known long before, and not read ahead"


def test_a_dataset_stored_by_class_is_read_in_whole_chunks() -> None:
    classes = 1 + np.arange(NUM_SAMPLES) * 8 // NUM_SAMPLES
    for order in (shuffled(3), np.argsort(classes[::-1], kind="stable")):
        found = run(classes, [order[rank::3] for rank in range(3)], memory=0.1)
        assert found == {"reads": 1, "gets": 1, "misses": 0}


def began(classes: Int64Array, order: Int64Array, answered: tuple[Int64Array, Int64Array] | None = None) -> EpochBegan:
    share = ChunkLayout(np.array([0, len(classes)]), 4).share(0, 1)
    lengths = np.ones(len(classes), dtype=np.int64)
    return EpochBegan(AbstractMapping(share, 1), traces_of(classes, [order]), lengths, key="1", answered=answered)


def test_what_was_answered_out_of_class_is_refused() -> None:
    classes = np.array([1, 1, 2, 2])
    KIND.new(began(classes, np.arange(4), (np.array([0]), np.array([1]))))
    with pytest.raises(ValueError, match="other classes"):
        KIND.new(began(classes, np.arange(4), (np.array([0]), np.array([2]))))


def test_a_trace_without_classes_is_redirected_over_the_dataset() -> None:
    assert isinstance(KIND.new(began(np.zeros(4, dtype=np.int64), np.arange(4))), DrainPolicy)


def test_a_full_memory_keeps_nobody_from_a_class() -> None:
    """Memory for one sample, which another class has, and a batch of one class: read as it is asked for."""
    classes = np.array([1, 1, 1, 1, 2, 2, 2, 2])
    core = KIND.new(began(classes, np.array([0, 4, 5, 6, 7, 1, 2, 3])))
    core.memory_changed(1)
    first = core.requested(0, np.array([0]))
    assert classes[first.samples[0]] == 1
    answers = core.requested(0, np.array([4, 5, 6, 7]))
    assert sorted(answers.samples.tolist()) == [4, 5, 6, 7]
    assert len(answers.orders.reads) == 1, "one GET for a batch of one class out of one chunk"


def test_whom_memory_runs_out_of_first() -> None:
    demand = ClassDemand(np.array([0, 1, 0, 1]), 3, np.array([0, 1, 1, 0]), np.array([0, 0, 2, 5]), 2)
    assert demand.shortest() == (0, 0)
    demand.covered(0, 1)
    assert demand.shortest() == (1, 1)
    demand.covered(1, 2)
    assert demand.shortest() == (5, 0)
    demand.covered(0, 1)
    assert demand.shortest() is None
    assert demand.counts.tolist() == [2, 2, 0]


def test_what_a_trace_can_not_name() -> None:
    ids = np.array([0, 1, 2])
    named = entries_of(ids, np.array([1, 2, 3]))
    assert ids_of(named).tolist() == [0, 1, 2]
    check_ids(3, 0, named, may_name_classes=True)
    with pytest.raises(InvalidInput, match="trace of rank 0 asks for sample 1099511627776"):
        check_ids(3, 0, named)
    with pytest.raises(InvalidInput, match="asks for sample 2; there are 0 to 1"):
        check_ids(2, 0, named, may_name_classes=True)
    with pytest.raises(InvalidInput, match=f"names class {MOST_CLASSES}; classes are 0 to"):
        check_ids(3, 0, entries_of(ids, np.full(3, MOST_CLASSES)), may_name_classes=True)
    with pytest.raises(InvalidInput, match="traces ask for sample 1 as one of class 4, and as one of 5"):
        ExplicitTraces(3, {0: entries_of(np.array([1]), np.array([4])), 1: entries_of(np.array([1]), np.array([5]))})


def test_which_jobs_may_name_classes() -> None:
    within: dict[str, Any] = {"policy": "drain", "policy_settings": {"within": "class"}}
    assert JobSpec("job", "file:///x", order="explicit", **within).names_classes
    assert not JobSpec("job", "file:///x", order="explicit").names_classes
    for wrong in ({}, {"order": "explicit", "shuffle": False}):
        with pytest.raises(InvalidInput, match="within='class' of policy drain goes with order='explicit' and shuffle"):
            JobSpec("job", "file:///x", **(within | wrong))
    for policy in ("exact", "redox"):
        with pytest.raises(InvalidInput, match=f"policy {policy} has no setting 'within'"):
            JobSpec("job", "file:///x", order="explicit", **(within | {"policy": policy}))
