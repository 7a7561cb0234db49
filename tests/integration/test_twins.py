"""Two processes that call themselves the same rank, on a real pod: told apart, and the second refused by name."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.forked_processes import start_rank
from tests.integration.asked_process import answers_requests, asks
from tests.pod_fixtures import NUM_SAMPLES, rank_of

from refill.errors import RankTaken
from refill.pods.own_life import own_life
from refill.pods.pod_connection import PodConnection
from refill.protocol.rank_life import RankLife
from refill.protocol.wire_format import BatchRequest
from refill_service.cache_core.rank_leases import LEASE_SECONDS
from refill_service.demo.local_cluster import LocalCluster

FORK = multiprocessing.get_context("fork")
EVERY_SAMPLE = list(range(NUM_SAMPLES))
ELSEWHERE = RankLife("node-7", 4711, 123456, "c0ffee")
"""A process of another machine, which can't be looked at from here."""


class Process:
    """See ``rank_process.py``."""

    def __init__(self, url: str, arguments: dict[str, Any], **more: Any) -> None:
        settings = {"url": url, "arguments": arguments, "num_workers": 0, "method": None} | more
        script = Path(__file__).with_name("rank_process.py")
        self._process, self._to_it, self._from_it = start_rank(script, json.dumps(settings))
        self.pid = self._process.pid

    def ask(self, what: str) -> Any:
        self._to_it.write(f"{what}\n")
        self._to_it.flush()
        return json.loads(self._from_it.readline())

    def kill(self, *, reap: bool = True) -> None:
        """The process alone: loader workers are left for some seconds, as when memory ran out."""
        os.kill(self.pid, signal.SIGKILL)
        with held_open(os.pidfd_open(self.pid)) as ends:
            assert select.select([ends], [], [], 60)[0]
        if reap:
            self._process.wait()

    def close(self) -> None:
        """With its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(60)
        self._to_it.close()
        self._from_it.close()


@contextlib.contextmanager
def held_open(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.fixture
def job(job: dict[str, Any]) -> dict[str, Any]:
    """Of a live policy: for planned jobs see ``tests/membership``."""
    return job | {"policy": "redox"}


@pytest.fixture
def start(three_pods: LocalCluster, job: dict[str, Any]) -> Iterator[Callable[..., Process]]:
    """Starts training processes of rank 0 of the test's job."""
    arguments = {("job" if name == "name" else name): value for name, value in job.items()} | {"timeout_seconds": 60}
    started: list[Process] = []

    def begin(rank: int = 0, world_size: int = 1, policy: str = "redox", **more: Any) -> Process:
        settings = arguments | {"rank": rank, "world_size": world_size, "policy": policy}
        started.append(Process(three_pods.pod_urls[0], settings, **more))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def speak_for_rank(cluster: LocalCluster, job: dict[str, Any], life: str, rank: int = 0) -> httpx.Response:
    """As a process that is not made the rank by that: it goes on without no sample at all."""
    path = f"{cluster.pod_urls[rank % 3]}/v1/jobs/{job['name']}"
    about = {"incarnation": httpx.get(path).json()["incarnation"], "life": life}
    return httpx.put(f"{path}/epochs/0/ranks/{rank}/damaged", params=about, content=b"")


def holder_of(cluster: LocalCluster, job: dict[str, Any], rank: int = 0) -> str:
    """Which process a pod says that the rank is. Empty: none."""
    answer = speak_for_rank(cluster, job, ELSEWHERE.encode(), rank)
    return str(answer.json()["details"]["holder"]) if answer.status_code == 503 else ""


@contextlib.contextmanager
def kept_alive(cluster: LocalCluster, job: dict[str, Any], life: str) -> Iterator[None]:
    """A life is heard, as by its workers that live on, so that nobody else becomes the rank by waiting."""
    path, over = f"{cluster.pod_urls[0]}/v1/jobs/{job['name']}", threading.Event()
    known = httpx.get(path).json()["incarnation"]

    def be_heard() -> None:
        while not over.wait(0.5):
            httpx.get(f"{path}/ranks/0", params={"incarnation": known, "life": life}, timeout=60)

    thread = threading.Thread(target=be_heard)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def standing_still(process: Process) -> Iterator[None]:
    """With its workers."""
    os.killpg(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGCONT)


def rest_of(process: Process, ids: list[int]) -> list[int]:
    while len(ids) < NUM_SAMPLES:
        ids = ids + process.ask("batch")
    return ids


class Child:
    """A process that was started to train; its parent, this one, has made its dataset object."""

    def __init__(self, connection: PodConnection, context: Any = FORK) -> None:
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=answers_requests, args=(connection, there))
        self._process.start()
        self.pid: int = self._process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join()

    def batch(self, epoch: int, start: int, end: int) -> Any:
        self._pipe.send((epoch, start, end))
        return self._pipe.recv()

    def epoch(self, epoch: int) -> list[int]:
        return [
            sample
            for start in range(0, NUM_SAMPLES, 32)
            for sample in self.batch(epoch, start, min(start + 32, NUM_SAMPLES))
        ]


@pytest.mark.variants("redox")
@pytest.mark.parametrize("policy", ["redox", "planned"])
def test_a_twin_is_refused_by_name_and_the_first_goes_on(
    three_pods: LocalCluster, job: dict[str, Any], policy: str
) -> None:
    job |= {"policy": policy}
    host = socket.gethostname()
    with Child(rank_of(three_pods, job)) as first:
        first.batch(0, 0, 32)
        with pytest.raises(RankTaken) as error:
            rank_of(three_pods, job).batch(0, np.arange(10))
        refused = error.value.message
        assert refused.startswith(
            f"process {os.getpid()} on {host} calls itself rank 0 of job {job['name']}, and process "
        )
        assert f" and process {first.pid} on {host} has been that rank since 20" in refused
        assert refused.endswith(
            "two runs need two job names, and each process of a run a rank of its own (RANK, or rank=)"
        )
        assert "\n" not in refused
        assert sorted(first.epoch(0)) == EVERY_SAMPLE


@pytest.mark.parametrize("policy", ["redox", "planned"])
def test_a_rank_that_was_left_to_a_child_is_the_parents_again_when_that_has_ended(
    three_pods: LocalCluster, job: dict[str, Any], policy: str
) -> None:
    """As in a notebook that reads its loader in a process of its own, and then goes on itself."""
    own = rank_of(three_pods, job | {"policy": policy})
    own.batch(0, np.arange(32))
    with Child(own) as child:
        assert sorted(child.epoch(0)) == EVERY_SAMPLE
        with pytest.raises(RankTaken, match=rf"and process {child.pid} on .* has been that rank"):
            own.batch(1, np.arange(10))
    assert len(own.batch(1, np.arange(10)).payloads) == 10


@pytest.mark.parametrize(
    ("workers", "reap"),
    [({}, False), ({"num_workers": 2}, True)],
    ids=["a zombie", "forked workers"],
)
def test_a_process_that_was_killed_and_started_again_goes_on_at_once(
    three_pods: LocalCluster, job: dict[str, Any], start: Callable[..., Process], workers: dict[str, Any], reap: bool
) -> None:
    """Its workers live on for a while, and are refused."""
    first = start(**workers)
    ids = first.ask("batch") + first.ask("batch")
    killed = holder_of(three_pods, job)
    assert f":{first.pid}:" in killed, "a worker's life is that of the training process"
    again = start(**workers, state=first.ask("state"))
    first.kill(reap=reap)
    with kept_alive(three_pods, job, killed):
        ids += again.ask("batch")
    assert f":{again.pid}:" in holder_of(three_pods, job)
    left_over = speak_for_rank(three_pods, job, killed)
    assert left_over.status_code == 409, "it was not waited for, but seen to have ended"
    assert f"was replaced as rank 0 of job {job['name']}" in left_over.json()["message"]
    assert sorted(rest_of(again, ids)) == EVERY_SAMPLE


@pytest.mark.variant
@pytest.mark.parametrize("policy", ["redox", "planned"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_process_that_stands_still_keeps_its_place(
    start: Callable[..., Process], job: dict[str, Any], three_pods: LocalCluster, policy: str, num_workers: int
) -> None:
    """Stopped for longer than a lease lasts: by a debugger, or on a machine that is too busy."""
    job |= {"policy": policy}
    first = start(policy=policy, num_workers=num_workers)
    ids = first.ask("batch")
    with standing_still(first):
        twin = rank_of(three_pods, job, timeout_seconds=2.5 * LEASE_SECONDS)
        with pytest.raises(RankTaken, match=rf"is process {first.pid} on .*: it stands still\. If you end it, this"):
            twin.batch(0, np.arange(10))
    assert sorted(rest_of(first, ids)) == EVERY_SAMPLE


def test_looking_takes_no_lease(start: Callable[..., Process], three_pods: LocalCluster, job: dict[str, Any]) -> None:
    observer = start()
    assert observer.ask("look") == [NUM_SAMPLES, 0]
    assert holder_of(three_pods, job) == ""
    first = rank_of(three_pods, job)
    first.batch(0, np.arange(32))
    assert observer.ask("look") == [NUM_SAMPLES, 0]
    assert holder_of(three_pods, job) == own_life(os.getpid()).encode()


def test_ranks_of_one_process_and_two_datasets_of_one_process_are_no_twins(
    three_pods: LocalCluster, job: dict[str, Any]
) -> None:
    job["world_size"] = 2
    ranks = [rank_of(three_pods, job, rank) for rank in (0, 1, 0)]
    for rank in ranks:
        rank.batch(0, np.arange(10))
    assert holder_of(three_pods, job) == own_life(os.getpid()).encode()


@pytest.mark.variants("spawn")
@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.variant)])
def test_a_process_that_looked_at_a_batch_leaves_the_rank_to_the_one_that_it_starts_and_not_to_a_helper(
    three_pods: LocalCluster, job: dict[str, Any], method: str
) -> None:
    context: Any = multiprocessing.get_context(method)
    connection = rank_of(three_pods, job)
    connection.timeout_seconds = 0
    ids = connection.batch(0, np.arange(10)).sample_ids.tolist()
    answers = context.Queue()
    helper = context.Process(target=asks, args=(connection, answers), daemon=True)
    helper.start()
    assert answers.get() == ids
    helper.join()
    assert holder_of(three_pods, job) == own_life(os.getpid()).encode()
    with Child(connection, context) as child:
        assert child.batch(0, 0, 10) == ids
        assert f":{child.pid}:" in holder_of(three_pods, job)
        with pytest.raises(RankTaken, match=f"process {os.getpid()} on .* was replaced as rank 0 of job"):
            connection.batch(0, np.arange(10))
        assert sorted(child.epoch(0)) == EVERY_SAMPLE


def test_ranks_that_were_forked_from_one_process_are_no_twins(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    """As Lightning's ddp_fork does it."""
    job["world_size"] = 2
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [context.Process(target=asks, args=(rank_of(three_pods, job, rank), answers)) for rank in range(2)]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    assert len({sample for ids in found for sample in ids}) == 20


def test_clients_that_name_no_life_are_served(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    rank = rank_of(three_pods, job)
    rank.batch(0, np.arange(10))
    body = BatchRequest(0, 0, np.arange(10)).encode()
    assert httpx.post(f"{rank.home}/v1/jobs/{job['name']}/batch", content=body).status_code == 200


def test_a_twin_by_way_of_another_home_is_noticed_too(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    """And neither moves the rank on to its epoch, nor leaves anything behind that would keep the first from that."""
    known = rank_of(three_pods, job, timeout_seconds=0)
    url = three_pods.pod_urls[1]
    with Child(known) as first:
        first.batch(0, 0, 10)
        with pytest.raises(RankTaken, match=f"process {first.pid} on"):
            PodConnection(url, known.spec, 0, url, 0).batch(1, np.arange(10))
        assert sorted(first.epoch(0)) == EVERY_SAMPLE
        assert len(first.batch(1, 0, 10)) == 10


@pytest.mark.parametrize("life", ["", "x", "a:b:c:d", "h:1:1:" + "0" * 200])
def test_what_names_no_process_is_refused(three_pods: LocalCluster, job: dict[str, Any], life: str) -> None:
    rank = rank_of(three_pods, job)
    known = rank.info()["incarnation"]
    path = f"{three_pods.pod_urls[0]}/v1/jobs/{job['name']}/ranks/0"
    for answer in (
        httpx.get(path, params={"incarnation": known, "life": life}),
        httpx.put(f"{path}/lease", params={"incarnation": known, "life": life, "ended": ELSEWHERE.encode()}),
        httpx.put(f"{path}/lease", params={"incarnation": known, "ended": life, "life": ELSEWHERE.encode()}),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"] == "InvalidInput"
    assert uuid.UUID(known)
