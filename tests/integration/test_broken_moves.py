"""Jobs that move to more or to fewer pods while all else fails: pods and ranks that are gone, asleep, or come late."""

from __future__ import annotations

import gc
import pickle
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.integration.job_ranks import Packed, Ranks, check_receipt, cluster_of, settings_of
from tests.waiting import until_answered, until_logged

from refill.errors import JobLost, PodRecovering, PodUnreachable, RefillError
from refill.pod_channel import Wait
from refill.pod_connection import PodConnection


class Asleep:
    """A rank whose process stands still: nothing looks after its home, or reports what it has received."""

    def __init__(self, ranks: Ranks, number: int) -> None:
        connection = ranks.ranks.pop(number)
        self._record = connection._record  # lives as long as the process
        self._pickled = pickle.dumps(connection)
        del connection
        gc.collect()

    def wake(self) -> PodConnection:
        found: PodConnection = pickle.loads(self._pickled)
        return found


@pytest.mark.parametrize("killed", [pytest.param([1], marks=pytest.mark.variant), [0, 1, 2]], ids=str)
@pytest.mark.parametrize("journal", [True, False], ids=["journal", "no journal"])
def test_pods_that_die_in_an_epoch_that_has_moved(
    packed: Packed, tmp_path: Path, killed: list[int], journal: bool
) -> None:
    """Without journals, those that come back learn from others how it was dealt; if all are lost, it moves again."""
    job = settings_of(packed[0], policy="drain")
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


def test_a_pod_that_is_not_wanted_any_more_gives_nothing(packed: Packed, tmp_path: Path) -> None:
    """It may live on for a while, and a loader's worker may not know yet that the job has moved without it."""
    job = settings_of(packed[0], policy="drain", world_size=2)
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


def test_a_rank_that_reports_nothing(packed: Packed, tmp_path: Path) -> None:
    """It may have had samples that nobody knows of: the job does not go on as if it had not."""
    job = settings_of(packed[0], policy="drain", world_size=2)
    with cluster_of(tmp_path, 2, journal=True, recovery_seconds=2) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        del ranks.ranks[1]
        gc.collect()  # with what looks after its home
        cluster.scale(3)
        with pytest.raises(JobLost, match=r"can't move to the 3 pods .* rank 1 did not tell .* begin the epoch anew"):
            ranks.ask(0, 100, 200)


def test_a_move_that_is_taken_back(packed: Packed, tmp_path: Path) -> None:
    """One rank was told of it and takes nothing from pods as they were before; they don't know of it any more."""
    job = settings_of(packed[0], policy="drain", world_size=2)
    with cluster_of(tmp_path, 2, journal=True) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        asleep = Asleep(ranks, 1)
        (awake,) = ranks.ranks
        awake.timeout_seconds = 2
        cluster.scale(3)
        with pytest.raises(PodRecovering, match="rank 1"):
            awake.batch(0, np.arange(100, 120))
        cluster.scale(2)
        awake.timeout_seconds = 60
        ranks.ranks = [asleep.wake(), awake]
        for rank in ranks.ranks:
            threading.Thread(target=ranks._ask, args=(rank, 0, 100, 120)).start()
            time.sleep(1)
        ranks.ask(0, 100, ranks.length)
        ranks.check(0)
        check_receipt(cluster, job, 0)


@pytest.mark.parametrize("journal", [True, False], ids=["journal", "no journal"])
def test_pod_0_dies_while_it_waits_for_ranks(packed: Packed, tmp_path: Path, journal: bool) -> None:
    """Its journal is of before the move, and says that the job ran on another number of pods."""
    job = settings_of(packed[0], policy="drain", world_size=2)
    with cluster_of(tmp_path, 2, journal=journal) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        asleep = Asleep(ranks, 1)
        cluster.scale(3)
        with ThreadPoolExecutor(1) as asking:
            waits = asking.submit(ranks.ask, 0, 100, 200)
            until_logged(cluster, 0, "and moves to 3")
            time.sleep(0.5)
            cluster.kill(0)
            cluster.restart(0)
            time.sleep(1)
            ranks.ranks.append(asleep.wake())
            ranks._ask(ranks.ranks[1], 0, 100, 200)
            waits.result(60)
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        check_receipt(cluster, job, 0)


def test_pods_that_are_lost_one_after_another(packed: Packed, tmp_path: Path) -> None:
    """The last one that knows how the epoch was dealt dies before others have learnt it: the job moves once more."""
    job = settings_of(packed[0], policy="drain")
    with cluster_of(tmp_path, 2, journal=False) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        cluster.scale(3)
        ranks.ask(0, 100, 200)
        for pod in (0, 1):
            cluster.kill(pod)
            cluster.restart(pod)
        until_answered(lambda: ranks.ranks[0]._pods._register_again(cluster.pod_urls[0], Wait(30)))
        cluster.kill(2)
        cluster.restart(2)
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        check_receipt(cluster, job, 0)


def test_two_pods_that_have_both_lost_a_job_that_has_moved(packed: Packed, tmp_path: Path) -> None:
    """One tells the other of it, and neither knows how its epoch was dealt."""
    job = settings_of(packed[0], policy="drain", world_size=1)
    with cluster_of(tmp_path, 1, journal=False) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 300)
        cluster.scale(2)
        ranks.ask(0, 300, 400)
        asleep = Asleep(ranks, 0)
        cluster.kill(0)
        cluster.restart(0)
        rank = asleep.wake()
        # Pod 1 knows of it, and what the rank has received is asked for.
        until_answered(lambda: rank._pods._register(cluster.pod_urls[0], Wait(30)))
        cluster.kill(1)
        cluster.restart(1)
        ranks.ranks = [rank]
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        check_receipt(cluster, job, 0)


def test_a_pod_whose_journal_knows_waits_for_one_that_lost_it(packed: Packed, tmp_path: Path) -> None:
    """Pod 0 ended in order, and asks who may have been left its table; that one has lost everything itself."""
    job = settings_of(packed[0], policy="drain", world_size=1)
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
    job = settings_of(packed[0], policy="drain", world_size=2)
    with cluster_of(tmp_path, 2, journal=False) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        asleep = Asleep(ranks, 1)
        with ThreadPoolExecutor(1) as asking:
            waits = asking.submit(ranks.ask, 0, 100, 200)
            for num_pods in (3, 2):
                cluster.scale(num_pods)
                until_logged(cluster, 0, f"and moves to {num_pods}")
                time.sleep(0.5)
            cluster.pause(0)
            cluster.kill(1)
            cluster.restart(1)
            awake = asleep.wake()
            with pytest.raises(RefillError):
                awake._pods.calls("GET", "ranks/1")(cluster.pod_urls[1], Wait(5))
            with pytest.raises(PodUnreachable, match="who holds job"):
                awake._pods._register(cluster.pod_urls[1], Wait(30))
            cluster.resume(0)
            ranks.ranks.append(awake)
            ranks._ask(awake, 0, 100, 200)
            waits.result(60)
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        check_receipt(cluster, job, 0)


def test_a_job_that_has_moved_comes_back_from_journals_while_a_pod_is_down(packed: Packed, tmp_path: Path) -> None:
    job = settings_of(packed[0], policy="drain")
    with cluster_of(tmp_path, 2, journal=True) as cluster:
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        cluster.scale(3)
        ranks.ask(0, 100, 200)
        for pod in (2, 0, 1):
            cluster.kill(pod)
        for pod in (0, 1):
            cluster.restart(pod)
        patient = ranks.ranks[0]
        patient.timeout_seconds = 15
        with pytest.raises(
            PodRecovering, match=r"no earlier process of it can be used any more: pod 2 .* can't be told"
        ):
            patient.batch(0, np.arange(200, 220))
        cluster.restart(2)
        patient.timeout_seconds = 60
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        check_receipt(cluster, job, 0)
