"""A neighbour that does not read what it is answered, and one that asks more than it is answered: what a pod holds for
them is counted, and stays within what it promises, also in the server for other pods."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pod_fixtures import metric
from tests.security.unread_neighbour import UnreadNeighbour
from tests.waiting import until

from refill.protocol.wire_format import BatchRequest
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster
from refill_service.serving.request_guard import LastPieces
from refill_service.serving.silent_peers import MOST_SILENT
from refill_service.settings import load_settings

TOKEN = "pods-0123456789abcdef"
MEMORY_BYTES = 16 << 20
SAMPLES, SAMPLE_BYTES, BATCH = 160, 100_000, 8
TAKEN_AHEAD = 5
"""Pieces of an answer that the server for other pods takes."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    source, store = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("store")
    for number in range(SAMPLES):
        (source / f"{number:04}.bin").write_bytes(bytes([number]) * SAMPLE_BYTES)
    asyncio.run(pack(str(source), store.as_uri()))
    return store.as_uri()


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[LocalCluster]:
    (tmp_path / "peers").write_text(TOKEN)
    settings: dict[str, str | int | float] = {"memory_bytes": MEMORY_BYTES, "peer_token": str(tmp_path / "peers")}
    with LocalCluster(1, tmp_path, settings) as cluster:
        yield cluster
        assert cluster.processes[0].poll() is None
        assert "Traceback" not in cluster.log(0)


def holds_its_promise(pod: LocalCluster) -> None:
    lines = Path(f"/proc/{pod.processes[0].pid}/status").read_text().splitlines()
    peak = int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) << 10
    promised = load_settings(memory_bytes=MEMORY_BYTES).promised_bytes
    print(f"peak {peak >> 20} MiB of {promised >> 20} promised")
    assert peak < promised


def is_answered(pod: LocalCluster) -> bool:
    return metric(pod.pod_urls[0], "refill_requests_under_way", asker="pod") == 0


def resident(pod: LocalCluster, kind: str) -> float:
    return metric(pod.pod_urls[0], "refill_resident_bytes", kind=kind)


def is_at_rest(pod: LocalCluster) -> bool:
    """It has answered ten others, and holds as much of answers as before."""
    before = resident(pod, "sending")
    for _ in range(10):
        assert httpx.get(f"{pod.pod_urls[0]}/v1/pods", timeout=60).status_code == 200
    return resident(pod, "sending") == before


def register(pod: LocalCluster, dataset: str) -> str:
    """Returns its plan."""
    url = f"{pod.pod_urls[0]}/v1/jobs/job"
    found = httpx.put(url, json={"dataset": dataset, "memory_bytes": 12 << 20}, timeout=60)
    assert found.status_code == 200, found.text
    return str(found.json()["plan_id"])


def ask_for_samples(neighbour: UnreadNeighbour, plan: str, requests: int) -> None:
    for number in range(requests):
        first = number * BATCH % SAMPLES
        body = BatchRequest(0, 0, np.arange(first, first + BATCH)).encode()
        neighbour.ask("POST", f"/peer/v1/jobs/job/planned/take?plan={plan}&pod=0", body)


@pytest.mark.slow_attack
@pytest.mark.parametrize("window_bytes", [0, None], ids=["allows nothing", "allows all"])
def test_samples_that_a_neighbour_does_not_take_count_until_it_does(
    pod: LocalCluster, large: str, window_bytes: int | None
) -> None:
    """320 MB of them: more than that is asked for at once waits for room, of which answers take their part only."""
    plan = register(pod, large)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            neighbour = stack.enter_context(UnreadNeighbour(pod.peer_ports[0], TOKEN, window_bytes))
            ask_for_samples(neighbour, plan, 100)
        until(lambda: resident(pod, "sending") > BATCH * SAMPLE_BYTES, "answers wait to be taken")
        until(lambda: is_at_rest(pod), "no more of them are taken")
        assert resident(pod, "sending") > BATCH * SAMPLE_BYTES, "they count"
        holds_its_promise(pod)
    until(lambda: is_answered(pod) and resident(pod, "sending") == 0, "nothing is held for who is gone")


@pytest.mark.slow_attack
def test_who_does_not_read_in_time_is_cut_off_and_nothing_is_kept(tmp_path: Path, large: str) -> None:
    (tmp_path / "peers").write_text(TOKEN)
    settings: dict[str, str | int | float] = {
        "memory_bytes": MEMORY_BYTES,
        "peer_token": str(tmp_path / "peers"),
        "client_timeout_seconds": 1,
    }
    with LocalCluster(1, tmp_path, settings) as pod:
        plan = register(pod, large)
        with UnreadNeighbour(pod.peer_ports[0], TOKEN, 0) as neighbour:
            ask_for_samples(neighbour, plan, 20)
            until(neighbour.is_over, "the connection is ended")
        until(lambda: is_answered(pod) and resident(pod, "sending") == 0, "nothing is held any more")


def small_requests(neighbour: UnreadNeighbour, body: bytes = b"") -> None:
    for _ in range(neighbour.most_requests):
        neighbour.ask("PUT" if body else "GET", "/peer/v1/jobs/job/planned", body, more=bool(body), json=bool(body))


def long_requests(neighbour: UnreadNeighbour) -> None:
    small_requests(neighbour, b"[" * neighbour.most_body_bytes)


def long_heads(neighbour: UnreadNeighbour) -> None:
    for _ in range(8):  # an attack that takes the attacker longer than the pod
        neighbour.ask("PUT", f"/peer/v1/jobs/job?why={'x' * 12_000}", b"[", more=True, json=True)


@pytest.mark.slow_attack
@pytest.mark.parametrize("token", [TOKEN, None], ids=["neighbour", "stranger"])
@pytest.mark.parametrize(
    ("asks", "window_bytes"), [(small_requests, 0), (small_requests, None), (long_requests, 0), (long_heads, 0)]
)
def test_requests_on_many_connections_are_held_within_bounds(
    pod: LocalCluster, asks: Callable[[UnreadNeighbour], None], window_bytes: int | None, token: str | None
) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MOST_SILENT // 4):
            with contextlib.suppress(ConnectionError):  # it has been ended
                asks(stack.enter_context(UnreadNeighbour(pod.peer_ports[0], token, window_bytes)))
        assert httpx.get(f"{pod.pod_urls[0]}/v1/pods", timeout=60).status_code == 200
        holds_its_promise(pod)
    until(lambda: is_answered(pod) and resident(pod, "receiving") == 0, "nothing is held for who is gone")


def test_a_host_has_few_connections_and_those_that_were_there_first(pod: LocalCluster) -> None:
    with contextlib.ExitStack() as stack:
        there_are = []
        for _ in range(20):
            there_are.append(stack.enter_context(UnreadNeighbour(pod.peer_ports[0], TOKEN, None)))
            there_are[-1].ask("GET", "/peer/v1/alive")
            if len(there_are) <= 5:  # the pod knows these before it hears of others
                there_are[-1].until_answered()
        until(lambda: sum(each.is_over() for each in there_are) == 12, "all but eight are ended")
        assert not any(each.is_over() for each in there_are[:5])


@given(st.lists(st.binary(max_size=40_000), max_size=6))
def test_an_answer_ends_with_small_pieces(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    last = LastPieces(len(whole))
    begins = [0, *accumulate(map(len, parts))]
    cut = [each for part, begin in zip(parts, begins, strict=False) for each in last.cut(part, begin)]
    assert b"".join(part for part, _ in cut) == whole
    pieces, waiting = list[int](), 0
    for part, ends in cut:
        waiting += len(part)
        if ends:
            pieces.append(waiting)
            waiting = 0
    if len(whole) <= 16 << 10:
        assert pieces == []
        return
    assert waiting == 0
    assert all(pieces), "none is empty"
    behind_the_rest = pieces[-TAKEN_AHEAD:]
    assert sum(behind_the_rest) <= 20 << 10, "what may be left of it"
    assert len(behind_the_rest) == TAKEN_AHEAD or sum(pieces) <= 20 << 10
