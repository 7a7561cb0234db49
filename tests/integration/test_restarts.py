"""Pods that are killed and come back in the middle of an epoch: it goes on, every sample exactly once."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from tests.integration.job_ranks import BATCH, Packed, Ranks, cluster_of, receipt, settings_of
from tests.pod_fixtures import NUM_SAMPLES, metric, rank_of
from tests.waiting import until

import refill
from refill.errors import JobLost, PodUnreachable, RefillError, error_from_wire
from refill.protocol.pod_life import PodLife
from refill.protocol.records import record_bytes
from refill.protocol.wire_format import BatchRequest
from refill_service.demo.local_cluster import LocalCluster

RECOVERY_SECONDS = 3
"""Of pods that wait for what never comes: long enough for the ranks that do come, on a busy machine, too."""


@pytest.fixture(scope="module", params=[True, False], ids=["journal", "no journal"])
def pods(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three, for one job after another."""
    with cluster_of(tmp_path_factory.mktemp("pods"), 3, journal=request.param) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("killed", "policy"),
    [
        pytest.param([0], "drain", marks=pytest.mark.variant),
        pytest.param([0], "redox"),
        pytest.param([1], "drain", marks=pytest.mark.variant),
        pytest.param([1], "redox", marks=pytest.mark.variant),
        pytest.param([0, 1, 2], "drain"),
        pytest.param([0, 1, 2], "redox", marks=pytest.mark.variant),
    ],
)
def test_killed_pods_come_back(packed: Packed, pods: LocalCluster, killed: list[int], policy: str) -> None:
    job = settings_of(packed[0], policy=policy)
    ranks = Ranks(pods, job)
    ranks.ask(0, 0, 120)
    for pod in killed:
        pods.kill(pod)
    for pod in killed:
        pods.restart(pod, wait=False)
    ranks.ask(0, 60, ranks.length)  # from before the kill: the same samples again
    ranks.check(0)
    found = receipt(pods, job, 0)
    assert (found["delivered"], found["duplicates"], found["missing"], found["unknown"]) == (NUM_SAMPLES, 0, 0, 0)
    assert found["exact"]
    ranks.ask(1, 0, ranks.length)
    ranks.check(1)
    ranks.ranks[0].end_job()


def test_a_single_pod(packed: Packed, tmp_path: Path) -> None:
    """Nobody but the ranks themselves can tell it what they have."""
    with cluster_of(tmp_path, 1, journal=False) as cluster:
        job = settings_of(packed[0], policy="drain", world_size=2)
        ranks = Ranks(cluster, job)
        for first in (0, 100, 300):
            ranks.ask(0, first, first + 100)
            cluster.kill(0)
            cluster.restart(0)
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        assert receipt(cluster, job, 0)["exact"]


def test_explicit_traces(packed: Packed, tmp_path: Path) -> None:
    """All pods are killed and nothing is on a disk: ranks post their traces again by themselves."""
    with cluster_of(tmp_path, 2, journal=False) as cluster:
        job = settings_of(packed[0], policy="drain", world_size=2, order="explicit")
        ranks = Ranks(cluster, job)
        order = np.random.default_rng(1).permutation(NUM_SAMPLES)
        for rank in ranks.ranks:
            rank.post_trace(0, order[rank.rank :: 2])
        ranks.ask(0, 0, 200)
        for pod in range(2):
            cluster.kill(pod)
        for pod in range(2):
            cluster.restart(pod)
        ranks.ask(0, 100, ranks.length)
        ranks.check(0)
        assert receipt(cluster, job, 0)["exact"]


def test_who_only_looks_tells_nothing(packed: Packed, tmp_path: Path) -> None:
    """It would say that the rank has received nothing, and be believed."""
    with cluster_of(tmp_path, 1, journal=False) as cluster:
        job = settings_of(packed[0], policy="drain", world_size=1)
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 300)
        settings = {("job" if name == "name" else name): value for name, value in job.items()}
        observer = refill.CacheDataset(cluster.pod_urls[0], order="keyed", **settings)
        assert len(observer) == NUM_SAMPLES
        cluster.kill(0)
        cluster.restart(0)
        with contextlib.suppress(RefillError):
            observer.connection.look_after_home()  # as it does every few seconds
        ranks.ask(0, 0, ranks.length)  # asked again, the same samples
        ranks.check(0)
        assert receipt(cluster, job, 0)["exact"]


def test_ranks_that_do_not_come_back_leave_something_unknown(packed: Packed, tmp_path: Path) -> None:
    """The pod and a rank lose their memory together. What the rank had is known to nobody, and the receipt says so."""
    with cluster_of(tmp_path, 1, journal=False, recovery_seconds=RECOVERY_SECONDS) as cluster:
        job = settings_of(packed[0], policy="drain", world_size=2)
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        ranks.ranks[1] = rank_of(cluster, job, 1)  # another process, that goes on where the first one was
        cluster.kill(0)
        cluster.restart(0)
        ranks.ranks[0].batch(0, np.arange(10))  # it brings the job back
        ranks.ask(0, 100, ranks.length)
        found = receipt(cluster, job, 0)
        assert found["unknown"] == 100, "the first 100 positions of rank 1 are known to nobody"
        assert (found["delivered"], found["missing"], found["exact"]) == (NUM_SAMPLES - 100, 0, False)


def test_a_pod_that_ends_in_order_leaves_what_it_delivered_with_another(packed: Packed, tmp_path: Path) -> None:
    """A rolling restart without volumes, and without ranks that remember."""
    with cluster_of(tmp_path, 3, journal=False, recovery_seconds=RECOVERY_SECONDS) as cluster:
        job = settings_of(packed[0], policy="drain")
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        for pod in range(3):
            cluster.processes[pod].terminate()
            cluster.processes[pod].wait(30)
            cluster.restart(pod)
            for rank in range(3):
                ranks.ranks[rank] = rank_of(cluster, job, rank)
            ranks.ask(0, 100 + 50 * pod, 150 + 50 * pod)
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        assert receipt(cluster, job, 0)["exact"]


def test_pods_are_replaced_while_no_rank_is_there(packed: Packed, tmp_path: Path) -> None:
    """As a StatefulSet does it, the last one first, each when the one before is ready; without volumes."""
    with cluster_of(tmp_path, 3, journal=False, recovery_seconds=RECOVERY_SECONDS) as cluster:
        job = settings_of(packed[0], policy="drain")
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        ranks.ranks.clear()
        for pod in (2, 1, 0):
            cluster.processes[pod].terminate()
            cluster.processes[pod].wait(30)
            cluster.restart(pod)
            about = f"{cluster.pod_urls[pod]}/v1/jobs/{job['name']}"
            until(lambda about=about: httpx.get(about).status_code == 200, f"pod {pod} with the job")  # type: ignore[misc]
        ranks.ranks += [rank_of(cluster, job, rank) for rank in range(3)]
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        assert receipt(cluster, job, 0)["exact"]


def test_a_request_that_a_pod_can_not_finish_before_it_ends_may_be_made_again(packed: Packed, tmp_path: Path) -> None:
    """It comes for longer than a pod that ends waits for its requests."""
    with cluster_of(tmp_path, 1, journal=False, drain_seconds=0.5, grace_seconds=2) as cluster:
        job = settings_of(packed[0], policy="drain", world_size=1)
        rank_of(cluster, job).info()
        url = urlsplit(cluster.pod_urls[0])
        waiting = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)
        body = BatchRequest(0, 0, np.arange(BATCH)).encode()
        waiting.putrequest("POST", f"/v1/jobs/{job['name']}/batch")
        waiting.putheader("content-length", str(len(body)))
        waiting.endheaders(body[:-8])
        until(lambda: metric(cluster.pod_urls[0], "refill_requests_under_way") == 1, "a request under way")
        cluster.processes[0].terminate()
        answer = waiting.getresponse()
        error = error_from_wire(json.loads(answer.read()), status=answer.status, source="the pod")
        assert isinstance(error, PodUnreachable), "clients give up on any other error"
        assert answer.status == error.status
        waiting.close()


def harm_cut(journal: Path, earlier: Path) -> None:
    for path in journal.glob("job-*/epoch-*.records"):
        path.write_bytes(path.read_bytes()[:-5])


def harm_cut_between_records(journal: Path, earlier: Path) -> None:
    for path in journal.glob("job-*/epoch-*.records"):
        data = path.read_bytes()
        ends = [0]
        while ends[-1] < len(data):
            ends.append(ends[-1] + record_bytes(data[ends[-1] :]))
        path.write_bytes(data[: ends[len(ends) // 2]])


def harm_flip(journal: Path, earlier: Path) -> None:
    for path in journal.glob("job-*/epoch-*.records"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def harm_records_gone(journal: Path, earlier: Path) -> None:
    for path in journal.glob("job-*/epoch-*.records"):
        path.unlink()


def harm_header_gone(journal: Path, earlier: Path) -> None:
    next(journal.glob("job-*/job.json")).unlink()


def harm_inventory_gone(journal: Path, earlier: Path) -> None:
    next(journal.glob("inventory-*")).unlink()


def harm_put_back(journal: Path, earlier: Path) -> None:
    folder = next(journal.glob("job-*"))
    shutil.rmtree(folder)
    shutil.copytree(earlier / folder.name, folder)


def harm_all_put_back(journal: Path, earlier: Path) -> None:
    shutil.rmtree(journal)
    shutil.copytree(earlier, journal)


def harm_torn(journal: Path, earlier: Path) -> None:
    """As if it was killed while it wrote: then no answer had left, and the journal is believed."""
    with next(journal.glob("job-*/epoch-0.records")).open("ab") as file:
        file.write(b"\x40\x00\x00")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (harm_torn, ""),
        (harm_cut, "epoch-0.records has .* bytes: cut, or an earlier copy"),
        (harm_cut_between_records, "epoch-0.records has .* bytes: cut, or an earlier copy"),
        (harm_flip, "epoch-0.records is not what was written last"),
        (harm_records_gone, "epoch-0.records is gone"),
        (harm_header_gone, ""),
        (harm_inventory_gone, "its inventory is lost"),
        (harm_put_back, "epoch-0.records has .* bytes: cut, or an earlier copy"),
        (harm_all_put_back, "it has .* answers of epoch 0, and other pods have heard of .*: an earlier copy"),
    ],
)
def test_a_journal_that_is_not_as_it_was_left(
    packed: Packed, tmp_path: Path, harm: Callable[[Path, Path], None], said: str
) -> None:
    with cluster_of(tmp_path, 2, journal=True) as cluster:
        job = settings_of(packed[0], policy="drain", world_size=2)
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        shutil.copytree(tmp_path / "journal-0", tmp_path / "earlier")
        ranks.ask(0, 100, 200)
        cluster.kill(0)
        harm(tmp_path / "journal-0", tmp_path / "earlier")
        cluster.restart(0)
        ranks.ask(0, 100, ranks.length)
        ranks.check(0)
        assert receipt(cluster, job, 0)["exact"]
        lines = [line for line in (tmp_path / "pod-0.log").read_text().splitlines() if "is not believed" in line]
        assert len(lines) == bool(said), lines
        assert all(re.search(said, line) for line in lines), lines


def test_a_job_that_was_ended_stays_so(packed: Packed, tmp_path: Path) -> None:
    with cluster_of(tmp_path, 2, journal=True) as cluster:
        job = settings_of(packed[0], policy="drain", world_size=2)
        ranks = Ranks(cluster, job, timeout_seconds=3)
        ranks.ask(0, 0, 100)
        ranks.ranks[0].end_job()
        for pod in range(2):
            cluster.kill(pod)
            cluster.restart(pod)
        with pytest.raises(JobLost, match="was ended"):
            ranks.ask(0, 100, 200)
        again = Ranks(cluster, job)
        again.ask(0, 0, again.length)
        again.check(0)


def test_the_receipt_of_an_epoch_that_is_long_over(packed: Packed, tmp_path: Path) -> None:
    with cluster_of(tmp_path, 2, journal=True) as cluster:
        job = settings_of(packed[0], policy="drain", world_size=2, num_epochs=0)
        ranks = Ranks(cluster, job)
        for epoch in range(5):
            ranks.ask(epoch, 0, ranks.length if epoch else 100)  # the first one is broken off
        for pod in range(2):
            cluster.kill(pod)
            cluster.restart(pod)
        ranks.ask(4, 0, 20)
        first, second = receipt(cluster, job, 0), receipt(cluster, job, 1, pod=1)
        assert (first["delivered"], first["missing"], first["exact"]) == (200, NUM_SAMPLES - 200, False)
        assert second["exact"]
        assert second["samples_digest"] == receipt(cluster, job, 4)["samples_digest"]
        assert len(list((tmp_path / "journal-0").glob("job-*/epoch-*"))) <= 3, "the journal is not bounded"


@pytest.mark.parametrize("num_pods", [1, 2])
def test_a_rank_that_asks_for_nothing_tells_all_the_same(packed: Packed, tmp_path: Path, num_pods: int) -> None:
    """As in data-parallel training: rank 1 has batches in hand and waits for rank 0, which waits for its next one."""
    with cluster_of(tmp_path, num_pods, journal=False) as cluster:
        job = settings_of(packed[0], policy="drain", world_size=2)
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 200)
        for pod in range(num_pods):
            cluster.kill(pod)
            cluster.restart(pod)
        waiting = ranks.ranks.pop(1)
        ranks.ask(0, 200, 300)
        ranks.ranks.append(waiting)
        ranks.ask(0, 200, ranks.length)
        ranks.check(0)
        assert receipt(cluster, job, 0)["exact"]


def test_what_a_pod_left_with_another_is_not_its_table_once_it_has_gone_on(packed: Packed, tmp_path: Path) -> None:
    """Its successor goes on from the journal, delivers more, and is then killed with its volume."""
    with cluster_of(tmp_path, 2, journal=True) as cluster:
        job = settings_of(packed[0], policy="drain", world_size=2)
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        cluster.processes[1].terminate()
        cluster.processes[1].wait(30)
        cluster.restart(1)
        ranks.ask(0, 100, 300)
        cluster.kill(1)
        shutil.rmtree(tmp_path / "journal-1")
        cluster.restart(1)
        ranks.ask(0, 300, ranks.length)
        ranks.check(0)
        assert receipt(cluster, job, 0)["exact"]


def test_a_rank_whose_record_lacks_something_is_gone_on_without(packed: Packed, tmp_path: Path) -> None:
    """Its temporary folder was full for a while: what it received is unknown, and the training goes on."""
    with cluster_of(tmp_path, 1, journal=False, recovery_seconds=RECOVERY_SECONDS) as cluster:
        job = settings_of(packed[0], policy="drain", world_size=2)
        ranks = Ranks(cluster, job)
        ranks.ask(0, 0, 100)
        (ranks.ranks[1]._record._folder / "whole").unlink()
        cluster.kill(0)
        cluster.restart(0)
        ranks.ask(0, 0, ranks.length)
        ranks.check(0)
        found = receipt(cluster, job, 0)
        assert (found["unknown"], found["missing"]) == (1, 0), "it reported all, and nobody knows that"


def test_traces_of_an_epoch_that_every_rank_has_left_are_not_waited_for(packed: Packed, tmp_path: Path) -> None:
    """Rank 0 has posted its next trace and kept no older one than the last, rank 1 is about to."""
    with cluster_of(tmp_path, 1, journal=False, recovery_seconds=RECOVERY_SECONDS) as cluster:
        job = settings_of(packed[0], policy="drain", world_size=2, order="explicit", num_epochs=0)
        ranks = Ranks(cluster, job)
        order = np.random.default_rng(1).permutation(NUM_SAMPLES)
        for epoch in range(2):
            for rank in ranks.ranks:
                rank.post_trace(epoch, order[rank.rank :: 2])
            ranks.ask(epoch, 0, ranks.length)
        ranks.ranks[0].post_trace(2, order[::2])
        cluster.kill(0)
        cluster.restart(0)
        ranks.ask(1, 0, 100)
        ranks.ranks[1].post_trace(2, order[1::2])
        ranks.ask(2, 0, ranks.length)
        ranks.check(2)
        assert receipt(cluster, job, 2)["exact"]


def test_a_pod_waits_for_the_one_before_it_to_leave_its_folders(tmp_path: Path) -> None:
    """Kubernetes starts it at once after `kubectl delete pod --force`. A start that fails would be tried again only
    after a pause of 10 s, then 20, ..."""
    settings = {"journal_dir": str(tmp_path / "journal-{ordinal}"), "drain_seconds": "0"}
    with LocalCluster(1, tmp_path, settings) as cluster:
        cluster.pause(0)
        before = cluster.replace(0)
        until(lambda: "is used by another pod: waiting up to 25 s" in cluster.log(0), "the word that it waits")
        ended = time.time_ns()
        before.kill()
        before.wait()
        until(lambda: "pod 0 of 1: clients on" in cluster.log(0).rpartition("waiting up to")[2], "the start")
        assert cluster.processes[0].poll() is None
        life = PodLife.decode((tmp_path / "journal-0" / "life").read_text())
        assert life.number > ended, "it counts from before that how long the other one may have confirmed other pods"


def test_a_pod_that_waits_for_its_folders_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """By a handler: without one a signal is lost on the first process of a container, and the pod would serve later."""
    settings = {"journal_dir": str(tmp_path / "journal-{ordinal}"), "drain_seconds": "0"}
    with LocalCluster(1, tmp_path, settings) as cluster:
        before = cluster.replace(0)
        try:
            until(lambda: "is used by another pod: waiting" in cluster.log(0), "the word that it waits")
            cluster.processes[0].terminate()
            assert cluster.processes[0].wait(10) == 0
        finally:
            before.kill()
            before.wait()
