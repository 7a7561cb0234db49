"""More pods, or fewer, while a job runs: it moves to those that there are, every sample still exactly once."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from tests.integration.job_ranks import Packed, Ranks, check_receipt, cluster_of, settings_of
from tests.pod_fixtures import NUM_SAMPLES, rank_of

import refill
from refill.errors import EpochEnded, JobLost, RecordsWanted
from refill.pod_connection import PodConnection
from refill_service.demo.local_cluster import LocalCluster


def flat(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


@pytest.mark.parametrize(
    ("before", "after", "journal", "policy"),
    [(2, 3, True, "drain"), (2, 3, False, "redox"), (3, 1, False, "drain"), (3, 1, True, "redox")],
)
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
    job = settings_of(packed[0], policy="drain", world_size=2)
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
    job = settings_of(packed[0], policy="drain")
    with cluster_of(tmp_path, 1, journal=True) as cluster:
        ranks = Ranks(cluster, job)
        for num_pods, position in ((3, 80), (2, 160), (3, 240)):
            ranks.ask(0, position - 80, position)
            cluster.scale(num_pods)
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        check_receipt(cluster, job, 0)


def test_traces_of_the_ranks_own(packed: Packed, tmp_path: Path) -> None:
    job = settings_of(packed[0], policy="drain", world_size=2, order="explicit")
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


def test_a_checkpoint_from_before_the_move(packed: Packed, tmp_path: Path) -> None:
    """Positions mean the same after it."""
    job = settings_of(packed[0], policy="drain", world_size=2)
    with cluster_of(tmp_path, 2, journal=True) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        cluster.scale(3)
        ranks.ask(0, 100, 200)
        same = [rank_of(cluster, job, rank) for rank in range(2)]
        for rank in same:
            positions = np.arange(80, 200)
            expected = [ranks.samples[0, rank.rank, position] for position in positions.tolist()]
            assert rank.batch(0, positions).sample_ids.tolist() == expected, "others than were fetched before"


def test_traces_with_repeats_move_twice(packed: Packed, tmp_path: Path) -> None:
    """Which of two positions that ask for a sample is the repeat changes with each move."""
    job = settings_of(packed[0], policy="drain", world_size=2, order="explicit")
    drawn = np.random.default_rng(1).integers(0, NUM_SAMPLES, (2, 800))
    with cluster_of(tmp_path, 2, journal=False) as cluster:
        ranks = [rank_of(cluster, job, rank) for rank in range(2)]
        got: dict[int, list[int]] = {0: [], 1: []}
        for rank, trace in zip(ranks, drawn, strict=True):
            rank.post_trace(0, trace)
        for num_pods, first, end in ((3, 0, 250), (2, 250, 500), (3, 500, 800)):
            for rank in ranks:
                got[rank.rank] += rank.batch(0, np.arange(first, end)).sample_ids.tolist()
            cluster.scale(num_pods)
        for rank in ranks:
            assert rank.batch(0, np.arange(800)).sample_ids.tolist() == got[rank.rank], "other samples than before"
        assert Counter(flat(list(got.values()))) == Counter(drawn.ravel().tolist())


class TestALoopThatWasResumedWithinTheEpoch:
    """It does not know what it had before, so a move that went by what it tells would deal that again."""

    def resumed(self, cluster: LocalCluster, url: str, *, probes: bool) -> tuple[Any, Any]:
        def loader() -> Any:
            dataset = refill.CacheDataset(
                cluster.pod_urls[0],
                dataset=url,
                job="resumed",
                policy="drain",
                chunk_size=16,
                memory_bytes=600_000,
                timeout_seconds=30,
            )
            sampler = refill.EpochSampler(dataset)
            batches = torch.utils.data.DataLoader(dataset, batch_size=20, sampler=sampler, collate_fn=list)
            return refill.timed(batches, dataset), dataset

        training, dataset = loader()
        for step, _ in enumerate(training):
            if step == 9:
                break
        state = training.state_dict()
        del training, dataset
        gc.collect()
        again, dataset = loader()
        if probes:
            next(iter(again))
        return again, (dataset, state)

    @pytest.mark.parametrize("probes", [False, True], ids=["at once", "after a look at a batch"])
    def test_it_ends(self, packed: Packed, tmp_path: Path, probes: bool) -> None:
        with cluster_of(tmp_path, 2, journal=False, recovery_seconds=3) as cluster:
            again, (_, state) = self.resumed(cluster, packed[0], probes=probes)
            again.load_state_dict(state)
            batches = iter(again)
            next(batches)
            cluster.scale(3)
            with pytest.raises(JobLost, match="rank 0 was resumed within epoch 0"):
                list(batches)

    def test_it_moves_in_the_next_epoch(self, packed: Packed, tmp_path: Path) -> None:
        with cluster_of(tmp_path, 2, journal=False) as cluster:
            again, (dataset, state) = self.resumed(cluster, packed[0], probes=False)
            again.load_state_dict(state)
            list(again)
            keys: list[str] = []
            for step, batch in enumerate(again):
                keys += [sample["__key__"] for sample in batch]
                if step == 9:
                    cluster.scale(3)
            assert len(keys) == len(set(keys)) == NUM_SAMPLES
            with pytest.raises(EpochEnded):  # rather than others than the first time
                dataset.connection.batch(0, np.arange(20))

    def test_it_is_not_begun_when_pods_were_told_already(self, packed: Packed, tmp_path: Path) -> None:
        with cluster_of(tmp_path, 2, journal=False) as cluster:
            again, (dataset, state) = self.resumed(cluster, packed[0], probes=False)
            cluster.scale(3)
            with contextlib.suppress(RecordsWanted):  # it says that it has received nothing, which is no answer yet
                dataset.connection.look_after_home()  # as the process does every few seconds
            with pytest.raises(JobLost, match="load states before anything else"):
                again.load_state_dict(state)


def test_a_given_home_that_is_gone_is_left(packed: Packed, tmp_path: Path) -> None:
    job = settings_of(packed[0], policy="drain", world_size=2)
    with cluster_of(tmp_path, 2, journal=False) as cluster:
        ranks = Ranks(cluster, job)
        gone = cluster.pod_urls[1]
        ranks.ranks[1] = PodConnection(cluster.pod_urls[0], ranks.ranks[0].spec, 1, gone, 60)
        ranks.ask(0, 0, 100)
        cluster.scale(1)
        ranks.ask(0, 100, ranks.length)
        ranks.check(0)
