"""Requests that begin and do not end: they are cut off soon, and meanwhile they are in nobody's way but their own."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.pod_fixtures import kind_of, metric

from refill.pods.credentials import Credentials
from refill.protocol.job_spec import JobSpec
from refill_service.demo.local_cluster import LocalCluster

TOKENS = {"vision": "vision-0123456789abcdef", "speech": "speech-0123456789abcdef"}


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A pod for two teams. It waits for a minute for those who are silent, as pods do."""
    tokens = tmp_path_factory.mktemp("tokens")
    for team, token in TOKENS.items():
        (tokens / team).write_text(token)
    settings = {"memory_bytes": "512MiB", "pinned_fraction": 0, "client_tokens": str(tokens)}
    with LocalCluster(1, tmp_path_factory.mktemp("pod"), settings) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(1, tmp_path_factory.mktemp("impatient"), {"client_timeout_seconds": 1}) as cluster:
        yield cluster


def rank(pod: LocalCluster, team: str, tmp_path: Path, settings: dict[str, Any]) -> Any:
    file = tmp_path / f"{team}.token"
    file.write_text(TOKENS[team])
    spec = JobSpec.from_dict(settings)
    return kind_of(spec)(pod.pod_urls[0], spec, 0, None, 0, credentials=Credentials(token_file=str(file)))


def begin(pod: LocalCluster, method: str, path: str, announced: int, sent: bytes, team: str = "") -> socket.socket:
    """A request of which this much is sent."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {announced}\r\n"
    head += f"Authorization: Bearer {TOKENS[team]}\r\n" if team else ""
    connection = socket.create_connection(("127.0.0.1", pod.ports[0]), 20)
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode())
    with contextlib.suppress(ConnectionError):  # it may have been refused meanwhile
        connection.sendall(sent)
    return connection


def held(pod: LocalCluster) -> float:
    headers = {"authorization": f"Bearer {TOKENS['vision']}"}
    lines = httpx.get(f"{pod.pod_urls[0]}/metrics", headers=headers).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith('refill_resident_bytes{kind="receiving"}'))


def until_it_stands_still(pod: LocalCluster) -> None:
    """Until the pod has taken in what was sent, as much as it takes."""
    before = -1.0
    deadline = time.monotonic() + 100
    while before != (before := held(pod)) or before == 0:
        assert time.monotonic() < deadline, "the pod takes in no body"
        time.sleep(0.2)


ATTACKS: dict[str, tuple[str, str, int, int, int]] = {
    "20 MiB of a trace": ("PUT", "/v1/jobs/greedy/epochs/0/ranks/0/trace", 1 << 30, 20 << 20, 1),
    "many bodies of JSON": ("PUT", "/v1/jobs/greedy", 1 << 16, 60_000, 200),
    "many bodies of JSON, for as many jobs": ("PUT", "/v1/jobs/greedy-%d", 1 << 16, 60_000, 200),
    "many batches": ("POST", "/v1/jobs/greedy/batch", 8 << 16, 500_000, 60),
}
PLANNED = "/v1/jobs/greedy/planned"
PLANNED_ATTACKS: dict[str, tuple[str, str, int, int, int]] = {
    "registrations": ("PUT", PLANNED, 1 << 16, 60_000, 200),
    "registrations of as many jobs": ("PUT", "/v1/jobs/greedy-%d/planned", 1 << 16, 60_000, 200),
    "batches": ("POST", f"{PLANNED}/batch?plan=%p", 16 << 16, 1_000_000, 60),
    "samples": ("POST", f"{PLANNED}/samples?plan=%p", 1 << 15, 30_000, 200),
    "pieces of lists": ("PUT", f"{PLANNED}/epochs/0/ranks/0/list?plan=%p&num_ranks=1&length=9", 1 << 20, 1_000_000, 60),
    "reports": ("PUT", f"{PLANNED}/received?plan=%p", 8 << 16, 500_000, 60),
}


@pytest.mark.parametrize(
    ("policy", "attack"),
    [*(("redox", each) for each in ATTACKS.values()), *(("planned", each) for each in PLANNED_ATTACKS.values())],
    ids=[*ATTACKS, *(f"planned: {each}" for each in PLANNED_ATTACKS)],
)
def test_bodies_that_stop_in_the_middle_keep_no_other_team_waiting(
    pod: LocalCluster, packed: tuple[str, Any], tmp_path: Path, policy: str, attack: tuple[str, str, int, int, int]
) -> None:
    method, path, announced, sent, times = attack
    of_both = {"dataset": packed[0], "policy": policy}
    greedy = rank(pod, "vision", tmp_path, {"name": "greedy", "order": "explicit"} | of_both)
    path = path.replace("%p", greedy.info().get("plan_id", ""))
    victim = rank(pod, "speech", tmp_path, {"name": "victim", "memory_bytes": 5_000_000} | of_both)
    of_plan = {"plan": victim.info().get("plan_id", "")}
    with contextlib.ExitStack() as stalled:
        for number in range(times):
            where = path.replace("%d", str(number))
            stalled.enter_context(begin(pod, method, where, announced, bytes(sent), "vision"))
        if "trace" not in path:
            until_it_stands_still(pod)
        assert len(victim.batch(0, np.arange(8)).payloads) == 8
        # One that is large, as batches go, finds room as well.
        large = httpx.post(
            f"{pod.pod_urls[0]}/v1/jobs/victim/{'planned/' * (policy == 'planned')}batch",
            params=of_plan,
            content=bytes(400_000),
            headers={"authorization": f"Bearer {TOKENS['speech']}"},
            timeout=60,
        )
        assert large.status_code == 400, "a body of 400 KB is read, and then is no batch"
    greedy.end_job()
    victim.end_job()


def test_a_body_that_stops_is_cut_off_however_much_of_it_has_come(impatient: LocalCluster) -> None:
    """Each 64 KiB used to earn it the whole timeout once more: after 20 MiB, five hours."""
    with begin(impatient, "PUT", "/v1/jobs/x", 1 << 20, bytes(1_000_000)) as connection:
        connection.settimeout(10)
        with contextlib.suppress(ConnectionError):
            while connection.recv(1 << 16):
                pass
    assert metric(impatient.pod_urls[0], "refill_connections_cut_total") >= 1


def test_a_body_that_comes_with_progress_but_for_ever_is_cut_off(impatient: LocalCluster) -> None:
    """64 KiB in each timeout are progress, and a mebibyte of them would take a quarter of an hour."""
    sent = 0
    with begin(impatient, "PUT", "/v1/jobs/x", 1 << 20, b"") as connection, contextlib.suppress(ConnectionError):
        while sent < 1_000_000:
            connection.sendall(bytes(66_000))
            sent += 66_000
            time.sleep(0.5)
    assert sent < 1_000_000


@pytest.mark.parametrize("name", ["trace", "samples", "batch", "take", "planned", "received"])
def test_what_a_body_may_hold_follows_from_the_route_and_not_from_a_jobs_name(
    impatient: LocalCluster, name: str
) -> None:
    url = impatient.pod_urls[0]
    for body in (bytes(2_000_000), iter([bytes(500_000)] * 4)):
        answer = httpx.put(f"{url}/v1/jobs/{name}", content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]) == (413, "RequestTooLarge")
    for what in ("batch", "planned/batch?plan=x", "planned/samples?plan=x"):
        asked = httpx.post(f"{url}/v1/jobs/{name}/{what}", content=b"123")
        assert asked.status_code == 404, "there is no such job: it is told apart from the route of that name"


def test_what_a_body_may_hold_is_looked_up_before_it_comes(impatient: LocalCluster) -> None:
    """Of a job that is not there, nothing is read; the pod would take in what its kernel has anyway."""
    with begin(impatient, "PUT", "/v1/jobs/nobody/epochs/0/ranks/0/trace", 1 << 40, b"") as connection:
        connection.settimeout(20)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404")
