"""More pods, or fewer, while a job runs: it moves to those that there are, every sample still exactly once."""

from __future__ import annotations

import gc
import pickle
import threading
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from tests.integration.test_restarts import Packed, Ranks, cluster_of, receipt, settings_of
from tests.pod_fixtures import NUM_SAMPLES, rank_of

import refill
from refill.errors import JobLost
from refill_service.demo.local_cluster import LocalCluster


def flat(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def check_receipt(cluster: LocalCluster, job: dict[str, Any], epoch: int) -> None:
    found = receipt(cluster, job, epoch)
    counted = (found["delivered"], found["duplicates"], found["missing"], found["unknown"])
    assert counted == (NUM_SAMPLES, 0, 0, 0), found


@pytest.mark.parametrize("policy", ["drain", "redox"])
@pytest.mark.parametrize("journal", [True, False], ids=["journal", "no journal"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_a_running_job_moves(
    packed: Packed, tmp_path: Path, before: int, after: int, journal: bool, policy: str
) -> None:
    """Ranks ask on as if nothing had happened; nobody loads a checkpoint."""
    job = settings_of(packed[0], policy=policy)
    with cluster_of(tmp_path, before, journal=journal) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 120)
        cluster.scale(after)
        ranks.ask(0, 60, ranks.length)  # from before the move: the same samples again
        ranks.check(0)
        check_receipt(cluster, job, 0)
        ranks.ask(1, 0, ranks.length)
        ranks.check(1)
        check_receipt(cluster, job, 1)
        assert f"moves to {after} pods in epoch 0" in cluster.log(0)


def test_a_training_loop_does_not_notice(packed: Packed, tmp_path: Path) -> None:
    """A DataLoader with workers, which have connections of their own, and a checkpoint from before."""
    url = packed[0]
    with cluster_of(tmp_path, 2, journal=False) as cluster:
        options = {"dataset": url, "job": "training", "chunk_size": 16, "memory_bytes": 600_000}

        def loader() -> Any:
            dataset = refill.CacheDataset(cluster.pod_urls[0], **options)
            loader = torch.utils.data.DataLoader(
                dataset, batch_size=20, sampler=refill.EpochSampler(dataset), num_workers=2, collate_fn=list
            )
            return refill.timed(loader, dataset)

        training = loader()
        keys: list[str] = []
        state: dict[str, Any] = {}
        for step, batch in enumerate(training):
            keys += [sample["__key__"] for sample in batch]
            if step == 14:
                state = training.state_dict()
                at = len(keys)
            if step == 19:
                cluster.scale(3)
        assert len(keys) == len(set(keys)) == NUM_SAMPLES
        again = loader()
        again.load_state_dict(state)
        assert [sample["__key__"] for batch in again for sample in batch] == keys[at:]


def test_ranks_in_two_epochs(packed: Packed, tmp_path: Path) -> None:
    """One has begun the next epoch when another has yet to end the one before."""
    job = settings_of(packed[0], world_size=2)
    with cluster_of(tmp_path, 2, journal=False) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 400)
        ahead, behind = ranks.ranks
        ranks.ranks = [ahead]
        ranks.ask(0, 400, ranks.length)
        ranks.ranks = [ahead, behind]
        one = threading.Thread(target=ranks._ask, args=(ahead, 1, 0, 60))
        one.start()  # waits for memory, or for the other rank, and may have got some
        one.join(3)
        cluster.scale(3)
        ranks.ask(0, 380, ranks.length)
        one.join(60)
        assert not one.is_alive()
        ranks.check(0)
        ranks.ask(1, 0, ranks.length)
        ranks.check(1)
        check_receipt(cluster, job, 1)


def test_scaled_again_within_the_epoch(packed: Packed, tmp_path: Path) -> None:
    job = settings_of(packed[0])
    with cluster_of(tmp_path, 1, journal=True) as cluster:
        ranks = Ranks(cluster, job)
        for num_pods, position in ((3, 80), (2, 160), (3, 240)):
            ranks.ask(0, position - 80, position)
            cluster.scale(num_pods)
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        check_receipt(cluster, job, 0)


@pytest.mark.parametrize("killed", [[1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("journal", [True, False], ids=["journal", "no journal"])
def test_pods_that_die_in_an_epoch_that_has_moved(
    packed: Packed, tmp_path: Path, killed: list[int], journal: bool
) -> None:
    """Without journals, those that come back learn from others how it was dealt; if all are lost, it moves again."""
    job = settings_of(packed[0])
    with cluster_of(tmp_path, 2, journal=journal) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        cluster.scale(3)
        ranks.ask(0, 100, 200)
        for pod in killed:
            cluster.kill(pod)
        for pod in killed:
            cluster.restart(pod)
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        check_receipt(cluster, job, 0)
        ranks.ask(1, 0, ranks.length)
        ranks.check(1)


def test_traces_of_the_ranks_own(packed: Packed, tmp_path: Path) -> None:
    job = settings_of(packed[0], world_size=2, order="explicit")
    traces = [np.arange(0, 600), np.concatenate([np.arange(500, 900), np.arange(100)])]
    with cluster_of(tmp_path, 2, journal=False) as cluster:
        ranks = [rank_of(cluster, job, rank) for rank in range(2)]
        for rank, trace in zip(ranks, traces, strict=True):
            rank.post_trace(0, trace)
        had = [rank.batch(0, np.arange(200)).sample_ids.tolist() for rank in ranks]
        cluster.scale(3)
        for rank, trace in zip(ranks, traces, strict=True):
            rank.post_trace(0, trace)  # as a loop does that begins the epoch again
        rest = [
            rank.batch(0, np.arange(200, len(trace))).sample_ids.tolist()
            for rank, trace in zip(ranks, traces, strict=True)
        ]
        assert [rank.batch(0, np.arange(200)).sample_ids.tolist() for rank in ranks] == had
        assert Counter(flat(had + rest)) == Counter(np.concatenate(traces).tolist())
        following = [np.arange(300), np.arange(300, 600)]
        for rank, trace in zip(ranks, following, strict=True):
            rank.post_trace(1, trace)
        got = [rank.batch(1, np.arange(300)).sample_ids.tolist() for rank in ranks]
        assert sorted(flat(got)) == list(range(600))


def test_a_pod_that_is_not_wanted_any_more_gives_nothing(packed: Packed, tmp_path: Path) -> None:
    """It may live on for a while, and a loader's worker may not know yet that the job has moved without it."""
    job = settings_of(packed[0], world_size=2)
    with cluster_of(tmp_path, 2, journal=False) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        worker = pickle.loads(pickle.dumps(ranks.ranks[1]))  # another process of the rank, that stood still meanwhile
        assert worker.home == cluster.pod_urls[1]
        old = cluster.processes.pop()  # stays
        try:
            cluster.scale(1)
            ranks.ask(0, 100, 120)
            positions = np.arange(120, 140)
            samples = worker.batch(0, positions).sample_ids.tolist()
            ranks.ask(0, 120, ranks.length)
            assert [ranks.samples[0, 1, position] for position in positions.tolist()] == samples
            ranks.check(0)
        finally:
            old.kill()
            old.wait()


def test_a_rank_that_tells_nothing(packed: Packed, tmp_path: Path) -> None:
    """It may have had samples that nobody knows of: the job does not go on as if it had not."""
    job = settings_of(packed[0], world_size=2)
    with cluster_of(tmp_path, 2, journal=True, recovery_seconds=2) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        incarnation = ranks.ranks[0].info()["incarnation"]
        consumed = {sample for (_, _, position), sample in ranks.samples.items() if position < 100}
        del ranks.ranks[1]
        gc.collect()  # with what looks after its home
        cluster.scale(3)
        with pytest.raises(JobLost, match=r"can't move to the 3 pods .* rank 1 did not tell .* resume it"):
            ranks.ask(0, 100, 200)
        again = [rank_of(cluster, job, rank) for rank in range(2)]
        for rank in again:
            rank.resume(incarnation, 0, 100)
        length = again[0].info()["resumed"]["samples_per_rank"]
        rest = [rank.batch(0, np.arange(length)).sample_ids.tolist() for rank in again]
        assert consumed.isdisjoint(flat(rest))
        assert len(consumed.union(*rest)) == NUM_SAMPLES


def test_a_checkpoint_from_before_the_move(packed: Packed, tmp_path: Path) -> None:
    """Positions mean the same after it, with the same ranks or with others."""
    job = settings_of(packed[0], world_size=2)
    with cluster_of(tmp_path, 2, journal=True) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        incarnation = ranks.ranks[0].info()["incarnation"]
        consumed = {sample for (_, _, position), sample in ranks.samples.items() if position < 80}
        cluster.scale(3)
        ranks.ask(0, 100, 200)
        same = [rank_of(cluster, job, rank) for rank in range(2)]
        for rank in same:
            rank.resume(incarnation, 0, 80)
            positions = np.arange(80, 200)
            expected = [ranks.samples[0, rank.rank, position] for position in positions.tolist()]
            assert rank.batch(0, positions).sample_ids.tolist() == expected, "others than were fetched before"
        other = [rank_of(cluster, job | {"world_size": 3}, rank) for rank in range(3)]
        for rank in other:
            rank.resume(incarnation, 0, 80)
        length = other[0].info()["resumed"]["samples_per_rank"]
        rest = [rank.batch(0, np.arange(length)).sample_ids.tolist() for rank in other]
        assert consumed.isdisjoint(flat(rest))
        assert len(consumed.union(*rest)) == NUM_SAMPLES
