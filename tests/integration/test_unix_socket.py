"""A training process on the pod's own machine: the same answers over a Unix socket, and clear words when it fails."""

from __future__ import annotations

import pickle
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ordered_cluster import OrderedCluster
from tests.pod_fixtures import kind_of
from tests.refill_command import refill_says

from refill.errors import InvalidInput, PodUnreachable
from refill.pods.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec

Packed = tuple[str, dict[str, bytes]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "refill.sock"


@pytest.fixture
def pod(tmp_path: Path, path: Path) -> Iterator[OrderedCluster]:
    with OrderedCluster(1, tmp_path, {"memory_bytes": "4MiB", "unix_socket": str(path)}) as cluster:
        yield cluster


def rank_at(url: str, dataset: str, name: str, **settings: Any) -> Any:
    spec = JobSpec(name, dataset, chunk_size=16, **settings)
    return kind_of(spec)(url, spec, 0, None, 10)


@pytest.mark.parametrize("policy", ["redox", "planned"])
def test_batches_are_the_same_as_over_tcp(pod: OrderedCluster, path: Path, packed: Packed, policy: str) -> None:
    unix, tcp = (rank_at(url, packed[0], "job", policy=policy) for url in (f"unix:{path}", pod.pod_urls[0]))
    assert unix.home == f"unix:{path}", "who names a socket wants no detour over TCP"
    for start in range(0, 1000, 250):
        positions = np.arange(start, start + 250)
        received = pickle.loads(pickle.dumps(unix)).batch(0, positions)  # as a DataLoader worker gets it
        again = tcp.batch(0, positions)  # a request is idempotent: the same samples
        assert received.sample_ids.tolist() == again.sample_ids.tolist()
        assert list(map(bytes, received.payloads)) == list(map(bytes, again.payloads))
    assert unix.samples(np.array([3, 5])).sample_ids.tolist() == [3, 5]
    takes = unix.epoch_counts(0)["total"]["takes"]
    assert takes == (1000 if policy == "redox" else 2000), "planned jobs keep no answers"
    unix.report(0.5, 1000, 1)
    unix.end_job()


def test_whoever_reaches_the_folder_may_ask(pod: OrderedCluster, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o666


def test_the_socket_of_a_killed_pod_is_replaced_and_goes_with_the_pod(
    pod: OrderedCluster, path: Path, packed: Packed
) -> None:
    pod.kill(0)
    assert path.is_socket()
    with pytest.raises(PodUnreachable, match=f"unix:{path} does not answer: .*refused"):
        PodConnection(f"unix:{path}", JobSpec("job", packed[0]), 0, None, 0).info()
    pod.restart(0)
    assert rank_at(f"unix:{path}", packed[0], "job").batch(0, np.array([0])).num_bytes > 0
    pod.end()
    assert not path.exists()


@pytest.mark.parametrize("url", ["unix:refill.sock", "unix:", "unix:/" + 100 * "x"])
def test_what_can_be_no_socket_is_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidInput, match="is not the Unix socket of a pod"):
        PodConnection(url, JobSpec("job", "file:///nowhere"), 0, None, 0)


def test_a_path_where_nothing_is(path: Path) -> None:
    with pytest.raises(PodUnreachable, match=f"unix:{path} does not answer: .*No such file"):
        PodConnection(f"unix:{path}", JobSpec("job", "file:///nowhere"), 0, None, 0).info()


def served_at(path: str) -> str:
    """What a pod says that can't start."""
    return refill_says("serve", "--port", "1", "--peer-port", "2", "--unix-socket", path)


def test_a_pod_says_in_one_line_why_it_cannot_listen(tmp_path: Path) -> None:
    assert "its folder is not there" in served_at(str(tmp_path / "none" / "refill.sock"))
    (tmp_path / "file").write_text("keep")
    assert "there is something else" in served_at(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "keep"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(tmp_path / "taken"))
        taken.listen()
        assert "another process serves it" in served_at(str(tmp_path / "taken"))
    assert "unix_socket" in served_at("refill.sock")
