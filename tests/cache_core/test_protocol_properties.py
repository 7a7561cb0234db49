"""Exactly once an epoch, whatever the shape, the interleaving and the losses."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from cluster_model import ClusterModel, Shape
from hypothesis import given, settings
from hypothesis import strategies as st

from refill_service.cache_core.epoch_order import ExplicitTraces
from refill_service.cache_core.policies.redox import RedoxPolicy


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    blobs = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    return Shape(
        blob_samples=tuple(blobs),
        chunk_size=draw(st.integers(1, max(blobs))),
        group_size=draw(st.integers(1, 6)),
        num_pods=draw(st.integers(1, 4)),
        num_ranks=draw(st.integers(1, 5)),
        batch=draw(st.integers(1, 17)),
        window=draw(st.sampled_from([0, 1, 3, 50, 1000])),
        remote_bytes=draw(st.integers(0, 20_000)),
        policy=draw(st.sampled_from(["redox", "drain"])),
        capacity_bytes=draw(st.integers(0, 50_000)),
        refill=draw(st.sampled_from(["best", "random"])),
        group_order=draw(st.sampled_from(["consecutive", "interleaved"])),
        drop_last=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32)),
    )


def run_epoch(model: ClusterModel, lose: float = 0.0, fail: float = 0.0, skew: int = 3) -> None:
    """Every rank asks for all its batches, in an order as several loader workers would; lost ones are asked again."""
    batch = model.shape.batch
    ranks = range(model.shape.num_ranks)
    todo = {
        rank: [
            np.arange(i, min(i + batch, model.traces.length(rank))) for i in range(0, model.traces.length(rank), batch)
        ]
        for rank in ranks
    }
    while any(todo.values()):
        rank = model.random.choice([rank for rank in ranks if todo[rank]])
        place = model.random.randrange(min(skew, len(todo[rank])))
        positions = todo[rank][place]
        model.ask(rank, positions, lose)
        model.some_reads_end(fail)
        if all((rank, position) in model.answers for position in positions.tolist()):
            del todo[rank][place]
    model.all_reads_end()


@settings(max_examples=150, deadline=None)
@given(shapes())
def test_every_sample_once(shape: Shape) -> None:
    model = ClusterModel(shape)
    run_epoch(model)
    delivered = model.delivered()
    expected = shape.num_samples if not shape.drop_last else shape.num_samples // shape.num_ranks * shape.num_ranks
    assert len(delivered) == sum(delivered.values()) == expected
    # With nothing dropped, waste is what was read and not delivered, to the byte.
    counts = [owner.counts for owner in model.owners]
    assert sum(count.bytes_read for count in counts) == model.read_bytes
    if not shape.drop_last:
        assert sum(count.bytes_filled for count in counts) == model.lengths.sum()
        assert sum(count.bytes_wasted for count in counts) == model.read_bytes - model.lengths.sum()
        assert all(owner.finished for owner in model.owners)
        for owner in model.owners:
            if isinstance(owner, RedoxPolicy):
                assert (owner.memory.sample_at < 0).all(), "samples left in memory"
            else:
                assert owner.held_bytes == 0, "samples left in memory"
    if shape.policy == "drain":
        assert sum(count.bytes_wasted for count in counts) == 0, "drain wastes nothing"


@settings(max_examples=80, deadline=None)
@given(shapes(), st.floats(0.05, 0.5))
def test_every_sample_once_with_lost_answers(shape: Shape, lose: float) -> None:
    model = ClusterModel(shape)
    run_epoch(model, lose=lose)
    delivered = model.delivered()
    assert max(delivered.values(), default=1) == 1, "a sample was delivered to two positions"
    if not shape.drop_last:
        assert len(delivered) == shape.num_samples


@settings(max_examples=80, deadline=None)
@given(shapes(), st.floats(0.05, 0.5))
def test_every_sample_once_with_failed_reads(shape: Shape, fail: float) -> None:
    """A read that fails loses nothing: what it promised stays promised, the rest is read again later."""
    model = ClusterModel(shape)
    run_epoch(model, fail=fail)
    delivered = model.delivered()
    assert max(delivered.values(), default=1) == 1
    if not shape.drop_last:
        assert len(delivered) == shape.num_samples
        counts = [owner.counts for owner in model.owners]
        # What a failed read had promised is read alone later, so it fills no slot.
        assert sum(count.bytes_filled for count in counts) <= model.lengths.sum(), "a sample was filled twice"
        assert sum(count.bytes_read for count in counts) == model.read_bytes


@settings(max_examples=60, deadline=None)
@given(shapes(), st.data())
def test_explicit_traces_stay_within_their_samples(shape: Shape, data: st.DataObject) -> None:
    """A subset, weighted with replacement: every position is answered, and only with samples of the subset."""
    ids = st.integers(0, shape.num_samples - 1)
    traces = {rank: np.array(data.draw(st.lists(ids, max_size=40)), dtype=np.int64) for rank in range(shape.num_ranks)}
    model = ClusterModel(shape, ExplicitTraces(shape.num_samples, traces))
    run_epoch(model)
    asked = Counter(np.concatenate(list(traces.values())).tolist())
    answered = Counter(model.answers.values())
    assert answered == asked, "each sample is delivered as often as the traces ask for it"


@pytest.mark.parametrize("policy", ["redox", "drain"])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_same_seed_same_calls_same_decisions(batch: int, policy: str) -> None:
    shape = Shape((100, 33, 64), 8, 4, 3, 2, batch, 50, 5000, policy, 20_000, seed=5)
    first, second = ClusterModel(shape), ClusterModel(shape)
    run_epoch(first)
    run_epoch(second)
    assert first.answers == second.answers
    assert [o.counts for o in first.owners] == [o.counts for o in second.owners]
