"""One process of a machine holds the connections to pods for all ranks and loader workers there: how many there are,
and what happens when it, a pod or who asks is gone."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.held_connections import connections_to, holder_folder, holders, until_gone
from tests.integration.job_ranks import exact_receipt, settings_of
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until
from torch.utils.data import DataLoader

import refill
from refill.errors import InvalidInput, PodUnreachable
from refill.holder.held_pool import MOST_CONNECTIONS
from refill.pods.credentials import HOLDER_VARIABLE, Credentials
from refill.pods.holder_door import ABOVE_RANKS, door, is_wanted
from refill.pods.planned_connection import PlannedConnection
from refill.pods.pod_channel import PodChannel, Wait
from refill.protocol.job_spec import JobSpec
from refill_service.demo.local_cluster import LocalCluster

__all__ = ["holder_folder"]

Packed = tuple[str, dict[str, bytes]]
BATCH = 10


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(3, tmp_path, {"memory_bytes": "16MiB", "pinned_fraction": 0, "wait_seconds": 1}) as found:
        yield found


class Ranks:
    """The ranks of a planned job of one epoch, each asking in threads of its own, as loader workers do."""

    def __init__(self, cluster: LocalCluster, packed: Packed, num_ranks: int, num_workers: int = 1) -> None:
        self.cluster, self.job = cluster, settings_of(packed[0], policy="planned", world_size=num_ranks, num_epochs=1)
        spec = JobSpec.from_dict(self.job)
        self.ranks = [PlannedConnection(cluster.pod_urls[rank % 3], spec, rank, None, 60) for rank in range(num_ranks)]
        self.length = int(self.ranks[0].info()["samples_per_rank"])
        self.came: list[int] = []
        self.errors: list[BaseException] = []
        self.may_end = threading.Event()
        """Set: their last batches are asked for."""
        self._threads = [
            threading.Thread(target=self._ask, args=(rank, worker, num_workers), daemon=True)
            for rank in self.ranks
            for worker in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, rank: PlannedConnection, worker: int, num_workers: int) -> None:
        try:
            starts = range(worker * BATCH, self.length, num_workers * BATCH)
            for start in starts:
                if start == starts[-1]:
                    self.may_end.wait()
                found = rank.batch(0, np.arange(start, min(start + BATCH, self.length)))
                self.came += found.sample_ids.tolist()
        except BaseException as error:
            self.errors.append(error)

    def come_to(self, count: int) -> None:
        until(lambda: len(self.came) >= count or bool(self.errors), f"{count} samples")
        assert not self.errors

    def end(self) -> None:
        """All have come, each once but for the padding."""
        self.may_end.set()
        for thread in self._threads:
            thread.join(100)
            assert not thread.is_alive(), "a rank hangs"
        assert not self.errors, self.errors
        assert len(self.came) == self.length * len(self.ranks)
        assert set(self.came) == set(range(NUM_SAMPLES))
        exact_receipt(self.cluster, self.job, 0)


def test_the_ranks_of_a_machine_have_few_connections(
    cluster: LocalCluster, packed: Packed, holder_folder: Path
) -> None:
    """32 ranks with 2 workers each would have 192 at 3 pods, one of each worker to each pod."""
    ranks = Ranks(cluster, packed, 32, num_workers=2)
    most = 0

    def all_have_asked() -> bool:
        nonlocal most
        most = max(most, connections_to(cluster.ports))
        return len(ranks.came) >= 32 * ranks.length - 64 * BATCH or bool(ranks.errors)

    until(all_have_asked, "all but the last batches")
    ranks.end()
    assert len(holders(holder_folder)) == 1
    # One to each pod may be in the place of another one, which is not closed yet.
    assert most <= 3 * (MOST_CONNECTIONS + 1), "so many of the holder, and none of the ranks"


MORE = pytest.mark.variant


@pytest.mark.parametrize(
    ("said", "num_ranks", "is_held"), [pytest.param("auto", 32, False, marks=MORE), ("off", 32, False)]
)
def test_small_jobs_and_those_who_say_so_have_connections_of_their_own(
    cluster: LocalCluster,
    packed: Packed,
    holder_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    num_ranks: int,
    is_held: bool,
) -> None:
    monkeypatch.setenv(HOLDER_VARIABLE, said)
    ranks = Ranks(cluster, packed, num_ranks)
    ranks.end()
    assert bool(holders(holder_folder)) == is_held


def test_large_jobs_have_one_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOLDER_VARIABLE, raising=False)
    assert [is_wanted(num_ranks) for num_ranks in (1, ABOVE_RANKS, ABOVE_RANKS + 1)] == [False, False, True]


def test_a_setting_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, packed: Packed) -> None:
    monkeypatch.setenv(HOLDER_VARIABLE, "yes")
    spec = JobSpec.from_dict(settings_of(packed[0], policy="planned"))
    with pytest.raises(InvalidInput, match="REFILL_CONNECTION_HOLDER must be auto, on or off, got 'yes'"):
        PlannedConnection("http://127.0.0.1:1", spec, 0, None, 1)


def killed(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def stopped(process: int) -> None:
    os.kill(process, signal.SIGSTOP)


@pytest.mark.parametrize("away", [killed, stopped])
def test_nothing_is_lost_with_the_holder(
    cluster: LocalCluster, packed: Packed, holder_folder: Path, away: Callable[[int], None]
) -> None:
    """Killed, it is started again by who asks next; while it stands still, they have connections of their own."""
    ranks = Ranks(cluster, packed, 4, num_workers=2)
    ranks.come_to(300)
    (holder,) = holders(holder_folder)
    away(holder)
    ranks.end()
    found = holders(holder_folder)
    assert (found == [holder]) == (away is stopped)
    assert not any("is away" in cluster.log(pod) for pod in range(3)), "that says nothing of pods"


def test_pods_that_are_gone_or_stand_still_are_stood_in_for(
    cluster: LocalCluster, packed: Packed, holder_folder: Path
) -> None:
    ranks = Ranks(cluster, packed, 4, num_workers=2)
    ranks.come_to(300)
    cluster.kill(1)
    ranks.come_to(500)
    cluster.restart(1)
    cluster.pause(2)
    ranks.come_to(700)
    cluster.resume(2)
    ranks.end()


def test_it_ends_when_nobody_is_connected(cluster: LocalCluster, packed: Packed, holder_folder: Path) -> None:
    """Pods see the connections close before, and so learn that the job's processes are gone."""
    spec = settings_of(packed[0], policy="planned", num_epochs=1, world_size=1)
    asks = (
        "import sys, numpy as np; from refill.pods.planned_connection import PlannedConnection as P; "
        "from refill.protocol.job_spec import JobSpec as J; "
        f"r = P({cluster.pod_urls[0]!r}, J.from_dict({spec!r}), 0, None, 60); r.batch(0, np.arange(20)); "
        "print('came', flush=True); sys.stdin.read()"
    )
    rank = subprocess.Popen([sys.executable, "-c", asks], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert rank.stdout is not None
    assert rank.stdout.readline() == b"came\n"
    assert len(holders(holder_folder)) == 1
    assert connections_to(cluster.ports) > 0
    rank.kill()
    rank.communicate()
    until(lambda: connections_to(cluster.ports) == 0, "the end of its connections")
    until_gone(holder_folder)
    assert not list(holder_folder.glob("*.sock"))


MORE = pytest.mark.variant


@pytest.mark.parametrize("way", ["fork", pytest.param("spawn", marks=MORE), pytest.param("forkserver", marks=MORE)])
def test_loader_workers_of_every_kind_go_by_way_of_it(
    cluster: LocalCluster, packed: Packed, holder_folder: Path, way: str
) -> None:
    job = settings_of(packed[0], num_epochs=1, world_size=1)
    name = job.pop("name")
    dataset = refill.CacheDataset(cluster.pod_urls[0], job=name, rank=0, policy="planned", **job)
    sampler = refill.EpochSampler(dataset)
    loader = DataLoader(dataset, 20, sampler=sampler, num_workers=2, collate_fn=list, multiprocessing_context=way)
    came = [sample["__id__"] for batch in loader for sample in batch]
    assert sorted(came) == list(range(NUM_SAMPLES))
    assert len(holders(holder_folder)) == 1
    assert connections_to(cluster.ports) <= 3 * MOST_CONNECTIONS


def test_a_folder_that_others_may_write_to_is_not_used(
    cluster: LocalCluster, packed: Packed, holder_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else could listen there. Ranks go on with connections of their own, and say so once."""
    holder_folder.mkdir()
    holder_folder.chmod(0o777)
    door.has_warned = False
    with caplog.at_level(logging.WARNING):
        ranks = Ranks(cluster, packed, 2)
        ranks.end()
    assert not holders(holder_folder)
    said = [each.message for each in caplog.records if "no connection holder" in each.message]
    assert len(said) == 1
    assert "is not a folder that only this user may enter" in said[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_not_answered(cluster: LocalCluster, packed: Packed, holder_folder: Path) -> None:
    """Even where the folder lets them in."""
    ranks = Ranks(cluster, packed, 2)
    ranks.come_to(20)
    holder_folder.chmod(0o755)
    holder_folder.parent.chmod(0o755)
    (path,) = holder_folder.glob("*.sock")
    path.chmod(0o777)
    asks = (
        "import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.settimeout(60); "
        f"s.connect({str(path)!r}); print(s.recv(1))"
    )
    found = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert found.stdout == "b''\n"
    ranks.end()


def test_what_is_no_request_of_ours_ends_that_connection_alone(
    cluster: LocalCluster, packed: Packed, holder_folder: Path
) -> None:
    ranks = Ranks(cluster, packed, 2)
    ranks.come_to(20)
    (path,) = holder_folder.glob("*.sock")
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"x" * 100_000, b"GET / HTTP/1.1\r\nRefill-Held: {}\r\n\r\n"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(60)
            sock.connect(str(path))
            sock.sendall(said)
            assert sock.recv(1) == b""
    ranks.end()


def test_a_request_that_waits_long_holds_up_no_others(tmp_path: Path, holder_folder: Path) -> None:
    """More of them than a pod has connections at first."""
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"

    def answer(sock: socket.socket) -> None:
        while head := sock.recv(10_000):
            if b"/slow" not in head:
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    def accept() -> None:
        while True:
            try:
                threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()

    def call(path: str, **more: Any) -> dict[str, Any]:
        return PodChannel(Credentials(), 2, held_for="a", **more).call("GET", url, path, Wait(60))

    def wait_long() -> None:
        with suppress(PodUnreachable):  # as the test ends
            call("/slow")

    for _ in range(8):
        threading.Thread(target=wait_long, daemon=True).start()
    until(lambda: connections_to([listening.getsockname()[1]]) == 8, "eight requests that wait")
    assert call("/fast") == {}
    assert call("/healthz") == {}
    assert call("/quick", is_quick=True) == {}
    listening.close()
