"""Ranks that share a batch: all of a group get the same samples, which are read once, and receipts count them once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.job_ranks import Packed, cluster_of, exact_receipt, settings_of
from tests.pod_fixtures import NUM_SAMPLES, rank_of

from refill.errors import InvalidInput
from refill.pods.batch_groups import BatchGroups, batch_groups
from refill.protocol.job_spec import JobSpec


def test_members_of_a_group_get_its_batches_and_a_killed_pod_changes_nothing(packed: Packed, tmp_path: Path) -> None:
    """Members are half an epoch apart: what one has had waits for the other as long as memory goes."""
    with cluster_of(tmp_path, 3) as cluster:
        job = settings_of(packed[0], policy="planned", world_size=4, batch_group=2, seed=3)
        ranks = [rank_of(cluster, job, rank) for rank in range(4)]
        length = ranks[0].info()["samples_per_rank"]
        assert length == -(-NUM_SAMPLES // 2)

        def ask(rank: int, first: int, end: int) -> list[int]:
            starts = range(first, end, 20)
            batches = [ranks[rank].batch(0, np.arange(start, min(start + 20, end))) for start in starts]
            return [sample for batch in batches for sample in batch.sample_ids.tolist()]

        half = length // 2
        of_ranks = [ask(rank, 0, half) for rank in range(4)]
        cluster.kill(1)
        of_ranks = [had + ask(rank, half, length) for rank, had in enumerate(of_ranks)]
        cluster.restart(1)
        assert of_ranks[0] == of_ranks[1]
        assert of_ranks[2] == of_ranks[3]
        assert set(of_ranks[0]) | set(of_ranks[2]) == set(range(NUM_SAMPLES))
        found = exact_receipt(cluster, job, 0)
        assert (found["planned"], found["received"], found["world_size"]) == (NUM_SAMPLES, NUM_SAMPLES, 2)


def test_the_store_is_read_once_for_a_group(packed: Packed, tmp_path: Path) -> None:
    with cluster_of(tmp_path, 1) as cluster:
        job = settings_of(packed[0], policy="planned", world_size=2, batch_group=2, num_epochs=1)
        ranks = [rank_of(cluster, job, rank) for rank in range(2)]
        for start in range(0, NUM_SAMPLES, 20):
            for rank in ranks:
                rank.batch(0, np.arange(start, min(start + 20, NUM_SAMPLES)))
        counts = ranks[0].epoch_counts(0)["total"]
    assert counts["takes"] == 2 * NUM_SAMPLES
    assert (counts["samples_filled"], counts["exact_reads"]) == (NUM_SAMPLES, 0), json.dumps(counts)
    # The first batch's samples are read alone, and the rest of their chunks goes over some of them.
    assert counts["samples_read"] < 1.05 * NUM_SAMPLES, json.dumps(counts)


class Mesh:
    """As much as is asked of dimensions of a DeviceMesh."""

    def __init__(self, *ranks: int | list[int]) -> None:
        self.mesh = np.array(ranks)


@pytest.mark.parametrize(
    ("mesh", "numbers", "members"),
    [
        (2, [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 0, 1, 0, 1, 0, 1]),
        (Mesh(2, 3), [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 0, 1, 0, 1, 0, 1]),
        (Mesh(1, 5), [0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 0, 0, 1, 1, 1, 1]),
        (Mesh(4, 6), [0, 1, 0, 1, 2, 3, 2, 3], [0, 0, 1, 1, 0, 0, 1, 1]),
        (Mesh([2, 3], [6, 7]), [0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 2, 3, 2, 3]),
        (Mesh([3], [7]), [0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 0, 0, 1, 1, 1, 1]),
        (Mesh([0]), list(range(8)), [0] * 8),
    ],
)
def test_groups_of_8_ranks(mesh: object, numbers: list[int], members: list[int]) -> None:
    groups = batch_groups(mesh)
    assert [groups.number(rank) for rank in range(8)] == numbers
    assert [groups.member(rank) for rank in range(8)] == members


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=5), st.data())
def test_groups_of_any_mesh_have_its_ranks(dimensions: list[tuple[int, bool]], data: st.DataObject) -> None:
    """Each rank of the same place in all other dimensions is of the same group, and none else."""
    sizes, shared = (list(each) for each in zip(*dimensions, strict=True))
    world = np.arange(math.prod(sizes)).reshape(sizes)
    inside = [axis for axis, is_shared in enumerate(shared) if is_shared]
    outside = [axis for axis, is_shared in enumerate(shared) if not is_shared]
    by_group = world.transpose(outside + inside).reshape([-1, *(sizes[axis] for axis in inside)])
    if not inside:
        by_group = by_group[:, None]
    groups = batch_groups(Mesh(*by_group[data.draw(st.integers(0, len(by_group) - 1))].tolist()))
    for number, ranks in enumerate(by_group):
        assert [groups.number(rank) for rank in ranks.flat] == [number] * ranks.size
        assert [groups.member(rank) for rank in ranks.flat] == list(range(groups.size))


def test_what_is_no_group_is_refused() -> None:
    assert batch_groups(1) == BatchGroups()
    for wrong in (0, -1, True, "tp", 1.5, None, Mesh(0, 1, 3), Mesh([0, 1], [4, 6]), Mesh([0, 4], [1, 5])):
        with pytest.raises(InvalidInput, match="batch_group"):
            batch_groups(wrong)
    with pytest.raises(InvalidInput, match=r"batch_group=2 does not divide world_size=3"):
        JobSpec("job", "file:///data", world_size=3, batch_group=2, policy="planned")
    with pytest.raises(InvalidInput, match="batch_group goes with policy='planned'"):
        JobSpec("job", "file:///data", world_size=2, batch_group=2, policy="redox")
