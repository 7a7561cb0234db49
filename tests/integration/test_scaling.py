"""More pods, or fewer, while a job runs: it moves to those that there are, every sample still exactly once."""

from __future__ import annotations

import gc
import pickle
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch.utils.data
from tests.integration.test_restarts import Packed, Ranks, cluster_of, receipt, settings_of
from tests.pod_fixtures import NUM_SAMPLES, rank_of

import refill
from refill.errors import EpochEnded, JobLost, PodRecovering, RefillError
from refill.pod_connection import PodConnection
from refill_service.demo.local_cluster import LocalCluster


def flat(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def until(came_about: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not came_about():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rest_of(cluster: LocalCluster, job: dict[str, Any], incarnation: str, position: int) -> list[int]:
    """All that is left of epoch 0 for ranks that resume the job there."""
    ranks = [rank_of(cluster, job, rank) for rank in range(job["world_size"])]
    for rank in ranks:
        rank.resume(incarnation, 0, position)
    length = ranks[0].info()["resumed"]["samples_per_rank"]
    return flat([rank.batch(0, np.arange(length)).sample_ids.tolist() for rank in ranks])


def check_receipt(cluster: LocalCluster, job: dict[str, Any], epoch: int) -> None:
    found = receipt(cluster, job, epoch)
    counted = (found["delivered"], found["duplicates"], found["missing"], found["unknown"])
    assert counted == (NUM_SAMPLES, 0, 0, 0), found


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
        rest = rest_of(cluster, job, incarnation, 100)
        assert consumed.isdisjoint(rest)
        assert len(consumed.union(rest)) == NUM_SAMPLES


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
        rest = rest_of(cluster, job | {"world_size": 3}, incarnation, 80)
        assert consumed.isdisjoint(rest)
        assert len(consumed.union(rest)) == NUM_SAMPLES


def test_what_an_old_journal_says_was_never_received(packed: Packed, tmp_path: Path) -> None:
    """A pod that comes back with the journal of before the moves has assigned samples that others got since."""
    job = settings_of(packed[0], world_size=2)
    with cluster_of(tmp_path, 3, journal=True) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        cluster.scale(2)
        ranks.ask(0, 100, 200)
        consumed = set(ranks.samples.values())
        incarnation = ranks.ranks[0].info()["incarnation"]
        ranks.ranks.clear()
        gc.collect()
        cluster.scale(3)
        rest = rest_of(cluster, job, incarnation, 200)
        assert consumed.isdisjoint(rest)
        assert len(consumed.union(rest)) == NUM_SAMPLES, "samples count as consumed that nobody has had"
        check_receipt(cluster, job, 0)


def test_a_move_that_is_taken_back(packed: Packed, tmp_path: Path) -> None:
    """One rank was told of it and takes nothing from pods as they were before; they don't know of it any more."""
    job = settings_of(packed[0], world_size=2)
    with cluster_of(tmp_path, 2, journal=True) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        told, other = ranks.ranks
        record, asleep = other._record, pickle.dumps(other)  # without what looks after its home
        ranks.ranks = [told]
        del other
        gc.collect()
        told.timeout_seconds = 2
        cluster.scale(3)
        with pytest.raises(PodRecovering, match="rank 1"):
            told.batch(0, np.arange(100, 120))
        cluster.scale(2)
        told.timeout_seconds = 60
        ranks.ranks = [pickle.loads(asleep), told]
        for rank in ranks.ranks:
            threading.Thread(target=ranks._ask, args=(rank, 0, 100, 120)).start()
            time.sleep(1)
        ranks.ask(0, 100, ranks.length)
        ranks.check(0)
        check_receipt(cluster, job, 0)
        del record


@pytest.mark.parametrize("journal", [True, False], ids=["journal", "no journal"])
def test_pod_0_dies_while_it_waits_for_ranks(packed: Packed, tmp_path: Path, journal: bool) -> None:
    """Its journal is of before the move, and says that the job ran on another number of pods."""
    job = settings_of(packed[0], world_size=2)
    with cluster_of(tmp_path, 2, journal=journal) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        asleep = pickle.dumps(ranks.ranks[1])
        record = ranks.ranks.pop()._record
        gc.collect()
        cluster.scale(3)
        with ThreadPoolExecutor(1) as asking:
            waits = asking.submit(ranks.ask, 0, 100, 200)
            until(lambda: "and moves to 3" in cluster.log(0))
            time.sleep(0.5)
            cluster.kill(0)
            cluster.restart(0)
            time.sleep(1)
            ranks.ranks.append(pickle.loads(asleep))
            ranks._ask(ranks.ranks[1], 0, 100, 200)
            waits.result(60)
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        check_receipt(cluster, job, 0)
        del record


def test_traces_with_repeats_move_twice(packed: Packed, tmp_path: Path) -> None:
    """Which of two positions that ask for a sample is the repeat changes with each move."""
    job = settings_of(packed[0], world_size=2, order="explicit")
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
                cluster.pod_urls[0], dataset=url, job="resumed", chunk_size=16, memory_bytes=600_000, timeout_seconds=30
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
            dataset.connection.look_after_home()  # as the process does every few seconds
            with pytest.raises(JobLost, match="load states before anything else"):
                again.load_state_dict(state)


def test_pods_that_are_lost_one_after_another(packed: Packed, tmp_path: Path) -> None:
    """The last one that knows how the epoch was dealt dies before others have learnt it: the job moves once more."""
    job = settings_of(packed[0])
    with cluster_of(tmp_path, 2, journal=False) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        cluster.scale(3)
        ranks.ask(0, 100, 200)
        for pod in (0, 1):
            cluster.kill(pod)
            cluster.restart(pod)
        ranks.ranks[0]._register_again(cluster.pod_urls[0], 30)
        cluster.kill(2)
        cluster.restart(2)
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        check_receipt(cluster, job, 0)


def test_two_pods_that_have_both_lost_a_job_that_has_moved(packed: Packed, tmp_path: Path) -> None:
    """One tells the other of it, and neither knows how its epoch was dealt."""
    job = settings_of(packed[0], world_size=1)
    with cluster_of(tmp_path, 1, journal=False) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 300)
        cluster.scale(2)
        ranks.ask(0, 300, 400)
        asleep, record = pickle.dumps(ranks.ranks[0]), ranks.ranks.pop()._record
        gc.collect()
        rank: PodConnection = pickle.loads(asleep)
        cluster.kill(0)
        cluster.restart(0)
        rank._register(cluster.pod_urls[0], 30)  # pod 1 knows of it, and what the rank has received is asked for
        cluster.kill(1)
        cluster.restart(1)
        ranks.ranks = [rank]
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        check_receipt(cluster, job, 0)
        del record


def test_a_pod_whose_journal_knows_waits_for_one_that_lost_it(packed: Packed, tmp_path: Path) -> None:
    """Pod 0 ended in order, and asks who may have been left its table; that one has lost everything itself."""
    job = settings_of(packed[0], world_size=1)
    with cluster_of(tmp_path, 1, journal=True) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 300)
        cluster.scale(2)
        ranks.ask(0, 300, 400)
        for pod in range(2):
            cluster.processes[pod].terminate()
            cluster.processes[pod].wait(30)
        shutil.rmtree(tmp_path / "journal-1")
        for pod in range(2):
            cluster.restart(pod)
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        check_receipt(cluster, job, 0)


def test_a_rank_that_slept_through_two_moves_ends_nothing(packed: Packed, tmp_path: Path) -> None:
    """It brings the job by its first name to a pod that has lost it, while the others wait for what it has received."""
    job = settings_of(packed[0], world_size=2)
    with cluster_of(tmp_path, 2, journal=False) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        asleep = pickle.dumps(ranks.ranks[1])
        record = ranks.ranks.pop()._record
        gc.collect()
        with ThreadPoolExecutor(1) as asking:
            waits = asking.submit(ranks.ask, 0, 100, 200)
            for num_pods in (3, 2):
                cluster.scale(num_pods)
                until(lambda num_pods=num_pods: f"and moves to {num_pods}" in cluster.log(0))  # type: ignore[misc]
                time.sleep(0.5)
            cluster.pause(0)
            cluster.kill(1)
            cluster.restart(1)
            awake: PodConnection = pickle.loads(asleep)
            with pytest.raises(RefillError):
                awake._call("GET", cluster.pod_urls[1], awake._data_path("ranks/1"), 5)
            awake._register(cluster.pod_urls[1], 30)
            cluster.resume(0)
            ranks.ranks.append(awake)
            ranks._ask(awake, 0, 100, 200)
            waits.result(60)
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        check_receipt(cluster, job, 0)
        del record


def test_a_job_that_has_moved_comes_back_from_journals_while_a_pod_is_down(packed: Packed, tmp_path: Path) -> None:
    job = settings_of(packed[0])
    with cluster_of(tmp_path, 2, journal=True) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        cluster.scale(3)
        ranks.ask(0, 100, 200)
        for pod in (2, 0, 1):
            cluster.kill(pod)
        for pod in (0, 1):
            cluster.restart(pod)
        for rank in ranks.ranks[:2]:
            rank.look_after_home()
            assert httpx.get(f"{rank.home}/v1/jobs/{job['name']}").status_code == 200
        cluster.restart(2)
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        check_receipt(cluster, job, 0)


@pytest.mark.parametrize("restarted_pods", [[], [0], [0, 1, 2]], ids=str)
def test_a_resumed_job_that_has_moved_is_resumed_from_the_same_state_again(
    packed: Packed, tmp_path: Path, restarted_pods: list[int]
) -> None:
    job = settings_of(packed[0], world_size=2)
    with cluster_of(tmp_path, 2, journal=True) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        incarnation = ranks.ranks[0].info()["incarnation"]
        job |= {"world_size": 3}
        again = [rank_of(cluster, job, rank) for rank in range(3)]
        for rank in again:
            rank.resume(incarnation, 0, 100)
        had = [rank.batch(0, np.arange(100)).sample_ids.tolist() for rank in again]
        cluster.scale(3)
        assert [rank.batch(0, np.arange(100)).sample_ids.tolist() for rank in again] == had
        for pod in restarted_pods:
            cluster.kill(pod)
        for pod in restarted_pods:
            cluster.restart(pod)
        restarted = [rank_of(cluster, job, rank) for rank in range(3)]
        for rank in restarted:
            rank.resume(incarnation, 0, 100)
        assert [rank.batch(0, np.arange(100)).sample_ids.tolist() for rank in restarted] == had


def test_a_given_home_that_is_gone_is_left(packed: Packed, tmp_path: Path) -> None:
    job = settings_of(packed[0], world_size=2)
    with cluster_of(tmp_path, 2, journal=False) as cluster:
        ranks = Ranks(cluster, job)
        gone = cluster.pod_urls[1]
        ranks.ranks[1] = PodConnection(cluster.pod_urls[0], ranks.ranks[0].spec, 1, gone, 60)
        ranks.ask(0, 0, 100)
        cluster.scale(1)
        ranks.ask(0, 100, ranks.length)
        ranks.check(0)
