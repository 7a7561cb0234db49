"""Can somebody without a token, or a neighbour, end a pod or keep it out by what they say of lives?"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.chaos.tcp_relay import Link, Relay
from tests.pod_fixtures import settings_of
from tests.security.hostile_pod import HostilePod
from tests.waiting import until, until_logged

from refill.protocol.pod_life import PodLife, pod_life_of
from refill_service.demo.local_cluster import LocalCluster

Packed = tuple[str, dict[str, bytes]]
TEAM, PODS = "vision-0123456789abcdef", "pods-0123456789abcdef"
LAST = "9999999999999999999-ffff"
"""The last number that a life can have: a life after it has none."""
TOO_LONG = "10000000000000000000-ffff"
MINUTE = 60 * 10**9


class Pods(LocalCluster):
    """Two, with journals. Pod 0 asks pod 1 by way of a link, which may lead elsewhere."""

    def __init__(self, folder: Path, relay: Relay) -> None:
        (folder / "team").write_text(TEAM)
        (folder / "pods").write_text(PODS)
        self.folder = folder
        self.relay = relay
        self.link: Link | None = None
        settings: dict[str, str | int | float] = {
            "memory_bytes": "4MiB",
            "pinned_fraction": 0,
            "client_tokens": str(folder / "team"),
            "peer_token": str(folder / "pods"),
            "journal_dir": f"{folder}/journal-{{ordinal}}",
            "access_log": "true",
        }
        super().__init__(2, folder, settings, peer_url=self._by_link)
        self.link = relay.link(self.peer_ports[1])

    def _by_link(self, from_pod: int, to_pod: int, url: str) -> str:
        return f"http://127.0.0.1:{self.link.port}" if self.link is not None and from_pod == 0 else url

    def lead_to(self, port: int) -> None:
        assert self.link is not None
        self.link.to_port = port
        self.relay.reset(self.link)

    def ask(self, pod: int, method: str, path: str, headers: Any = (), **more: Any) -> httpx.Response:
        """At the port of other pods."""
        with httpx.Client(http1=False, http2=True) as client:
            return client.request(method, f"http://127.0.0.1:{self.peer_ports[pod]}{path}", headers=headers, **more)

    def life(self, pod: int) -> PodLife:
        found = pod_life_of(httpx.get(f"{self.pod_urls[pod]}/healthz").headers["refill-life"])
        assert found is not None
        return found[1]

    def check_both_work(self, dataset: str) -> None:
        """Each takes a job, for which it asks the other one; and both are the processes that they were."""
        team = {"authorization": f"Bearer {TEAM}"}
        for pod_url in self.pod_urls:
            job = settings_of(dataset)
            url = f"{pod_url}/v1/jobs/{job.pop('name')}"
            until(partial(takes, url, headers=team, json=job), "a job")
            assert httpx.delete(url, headers=team).status_code == 200
        assert [process.poll() for process in self.processes] == [None, None]


def takes(url: str, **what: Any) -> bool:
    """503: to come again, as while a pod starts."""
    answer = httpx.put(url, timeout=60, **what)
    assert answer.status_code in (200, 503), answer.text
    return answer.status_code == 200


def shown(*more: tuple[str, str]) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {PODS}"), *more]


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with Relay() as relay, Pods(tmp_path_factory.mktemp("pods"), relay) as found:
        yield found


def soon() -> str:
    """A life that is to be believed of who may say so: clocks of two machines differ by as much."""
    return PodLife(time.time_ns() + 2 * MINUTE, "ffff").encode()


WITHOUT_A_TOKEN = [
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("POST", "/healthz"),
    ("GET", "/metrics"),
    ("GET", "/"),
    ("GET", "/no/such/route"),
    ("GET", "/peer/v1/lives"),
    ("PUT", f"/peer/v1/lives/0?life={LAST}"),
    ("PUT", f"/peer/v1/lives/1?life={LAST}"),
    ("DELETE", f"/peer/v1/lives/1?life={LAST}"),
    ("GET", "/peer/v1/jobs/any"),
    ("POST", "/peer/v1/jobs/any/take?incarnation=x&pod=1"),
    ("POST", "/peer/v1/jobs/any/samples?incarnation=x&pod=1"),
    ("PUT", "/peer/v1/jobs/any/kept?incarnation=x&pod=1"),
    ("PUT", "/peer/v1/jobs/any/planned"),
    ("GET", "/peer/v1/jobs/any/planned"),
    ("DELETE", "/peer/v1/jobs/any/planned?plan=x"),
    ("POST", "/peer/v1/jobs/any/planned/take?plan=x&pod=1"),
    ("PUT", "/peer/v1/jobs/any/planned/epochs/0/ranks/0/list?plan=x&num_ranks=1&length=1"),
]


@pytest.mark.parametrize("life", [LAST, TOO_LONG, "soon", "no life at all"])
@pytest.mark.parametrize("authorization", [None, "Bearer nobodys-0123456789abcdef", PODS, "Basic eDp5"])
def test_nobody_is_believed_who_shows_no_token(
    pods: Pods, packed: Packed, authorization: str | None, life: str
) -> None:
    """One GET of `/healthz` ended a pod, and no pod took a job any more, whichever was started again."""
    life = soon() if life == "soon" else life
    said = [("refill-asked-life", life), ("refill-life", f"1 {life}"), ("refill-pods", "2")]
    said += [("authorization", authorization)] if authorization else []
    for method, path in WITHOUT_A_TOKEN:
        answer = pods.ask(0, method, path, said)
        assert (answer.status_code, answer.json()["error"]) == (401, "NotAuthenticated"), (method, path)
        assert "refill-life" not in answer.headers, "whoever shows no token learns of no life"
    pods.check_both_work(packed[0])


def test_nobody_is_believed_however_a_header_is_written(pods: Pods, packed: Packed) -> None:
    """HTTP/1.1 has names of headers in any case; that port speaks HTTP/2, where they are in lower case."""
    for name in ("refill-asked-life", "Refill-Asked-Life", "REFILL-ASKED-LIFE"):
        assert pods.ask(0, "GET", "/healthz", [(name, LAST), (name, soon())]).status_code == 401
        with socket.create_connection(("127.0.0.1", pods.peer_ports[0]), 10) as connection:
            connection.sendall(f"GET /healthz HTTP/1.1\r\nHost: pod\r\n{name}: {LAST}\r\n\r\n".encode())
            answered = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(1 << 16):
                    answered += piece
        assert not answered.startswith(b"HTTP/1.1 2"), answered
    pods.check_both_work(packed[0])


def test_clients_say_nothing_of_lives(pods: Pods, packed: Packed) -> None:
    """On their port it makes no difference whether they show a token; and a probe is a GET."""
    said = {"refill-asked-life": soon(), "refill-life": f"1 {soon()}"}
    for path in ("/healthz", "/readyz", "/v1/jobs", "/no/such/route"):
        for shown in ({}, {"authorization": f"Bearer {TEAM}"}):
            answer = httpx.get(pods.pod_urls[0] + path, headers=said | shown)
            assert answer.status_code == (404 if "no" in path and shown else 200 if shown or "z" in path else 401)
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert httpx.request(method, f"{pods.pod_urls[0]}/healthz", headers=said).status_code == 401
    pods.check_both_work(packed[0])


ABSURD = [
    ([("refill-asked-life", LAST)], 409, "PodClockAhead"),
    ([("refill-life", f"1 {LAST}")], 409, "PodClockAhead"),
    ([("refill-asked-life", TOO_LONG)], 400, "InvalidInput"),
    ([("refill-life", f"1 {TOO_LONG}")], 400, "InvalidInput"),
    ([("refill-life", "one of them")], 400, "InvalidInput"),
    ([("refill-asked-life", "1-a"), ("refill-asked-life", "soon")], 400, "InvalidInput"),
    ([("refill-life", "1 1-a"), ("refill-life", "1 soon")], 400, "InvalidInput"),
]


@pytest.mark.parametrize(("said", "status", "error"), ABSURD)
@pytest.mark.parametrize("path", ["/peer/v1/lives", "/peer/v1/jobs/any", "/healthz"])
def test_a_number_that_no_life_can_have_is_refused_by_its_name(
    pods: Pods, packed: Packed, said: list[tuple[str, str]], status: int, error: str, path: str
) -> None:
    said = [(name, value.replace("soon", soon())) for name, value in said]
    answer = pods.ask(0, "GET", path, shown(*said))
    assert (answer.status_code, answer.json()["error"]) == (status, error)
    if status == 409:
        text = answer.json()["message"]
        assert "minutes from now by its clock" in text
        assert "set the clocks of their machines" in text
    pods.check_both_work(packed[0])


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
@pytest.mark.parametrize("pod", [0, 1, 2])
def test_a_pod_that_was_started_in_the_future_is_not_announced(
    pods: Pods, packed: Packed, method: str, pod: int
) -> None:
    hour = PodLife(time.time_ns() + 60 * MINUTE, "ffff").encode()
    assert pods.ask(0, method, f"/peer/v1/lives/{pod}?life={TOO_LONG}", shown()).status_code == 400
    for life in (LAST, hour):
        answer = pods.ask(0, method, f"/peer/v1/lives/{pod}?life={life}", shown())
        assert answer.status_code == (409 if method == "PUT" else 200), answer.text
    pods.check_both_work(packed[0])


def test_what_is_not_believed_is_logged_now_and_then(pods: Pods) -> None:
    for _ in range(20):
        pods.ask(0, "GET", "/peer/v1/lives", shown(("refill-life", f"1 {LAST}")))
    until_logged(pods, 0, "minutes from now by its clock")
    assert pods.log(0).count("minutes from now by its clock") == 1


@pytest.mark.parametrize("written", [LAST, TOO_LONG, "", "\xff\x00" * 1000, "9" * 10**6])
def test_a_pod_starts_on_a_volume_whatever_its_life_is_there(pods: Pods, packed: Packed, written: str) -> None:
    """Of a clock that was wrong, of a pod that had believed its neighbour, or of nobody."""
    pods.kill(1)
    (pods.folder / "journal-1" / "life").write_bytes(written.encode("latin-1"))
    before = time.time_ns()
    pods.restart(1)
    assert before < pods.life(1).number < time.time_ns()
    assert (pods.folder / "journal-1" / "life").read_text() == pods.life(1).encode()
    last = pods.log(1).splitlines()[-20:]
    assert any("journal-1/life" in line and ("has not come yet" in line or "put aside" in line) for line in last)
    pods.check_both_work(packed[0])


def test_a_clock_that_is_minutes_ahead_is_no_matter(pods: Pods, packed: Packed) -> None:
    """Of the machine where pod 1 ran; it goes on where the clock is right, with the number after that one."""
    ahead = PodLife(time.time_ns() + 2 * MINUTE, "ffff")
    pods.kill(1)
    assert pods.ask(0, "PUT", f"/peer/v1/lives/1?life={ahead.encode()}", shown()).status_code == 200
    (pods.folder / "journal-1" / "life").write_text(ahead.encode())
    pods.restart(1)
    assert pods.life(1).number == ahead.number + 1
    pods.check_both_work(packed[0])


REFUSALS = [
    (401, [("refill-life", f"1 {LAST}")]),
    (401, [("refill-life", "1 soon")]),
    (200, [("refill-life", f"1 {LAST}")]),
    (200, [("refill-life", f"1 {TOO_LONG}")]),
    (200, [("refill-life", "\x7f" * 1000)]),
    (404, [("refill-life", "0 soon")]),
    (200, []),
]


@pytest.mark.parametrize("newest", [LAST, TOO_LONG, "soon"])
@pytest.mark.parametrize(("status", "headers"), REFUSALS)
def test_who_has_the_address_of_a_pod_ends_no_other_for_good(
    pods: Pods, packed: Packed, status: int, headers: list[tuple[str, str]], newest: str
) -> None:
    """Another service may get the address of a pod, and refuse its neighbours' token: none of its lives is believed."""
    replaced = {"error": "PodReplaced", "message": "", "details": {"pod": 0, "newest": newest.replace("soon", soon())}}
    headers = [(name, value.replace("soon", soon())) for name, value in headers]
    body = json.dumps(replaced | {"lives": {"0": newest, "1": newest}, "wait_seconds": 1e300, "earlier": newest})
    job = settings_of(packed[0])
    url = f"{pods.pod_urls[0]}/v1/jobs/{job.pop('name')}"
    with HostilePod(status, headers, body.encode()) as hostile:
        pods.lead_to(hostile.port)
        while not hostile.paths:  # the connection to pod 1 is reset meanwhile
            answer = httpx.put(url, headers={"authorization": f"Bearer {TEAM}"}, json=job, timeout=60)
        assert answer.status_code != 200, answer.text
        assert status != 401 or answer.json()["error"] == "PodUnreachable", "to come again, whatever its body says"
        pods.lead_to(pods.peer_ports[1])
    pods.check_both_work(packed[0])
    httpx.delete(url, headers={"authorization": f"Bearer {TEAM}"})


@pytest.mark.parametrize(
    "answer",
    [
        {"lives": {"0": LAST, "1": LAST}, "wait_seconds": 1e300, "earlier": LAST},
        {"lives": {"0": TOO_LONG}, "wait_seconds": 0, "earlier": None},
        {"lives": {"0": 5}, "wait_seconds": 0, "earlier": None},
        {"lives": [], "wait_seconds": [], "earlier": {}},
        {"lives": {"x" * 10_000: LAST}, "wait_seconds": "inf", "earlier": "x"},
        {"lives": {}, "wait_seconds": 0},
        [],
        "",
        None,
    ],
)
def test_a_pod_that_starts_is_not_kept_out_by_what_a_neighbour_answers(pods: Pods, packed: Packed, answer: Any) -> None:
    """Its announcement was given up by the first answer of another form, and by any number it took the one after."""
    with HostilePod(body=json.dumps(answer).encode()) as hostile:
        pods.kill(0)
        pods.lead_to(hostile.port)
        before = time.time_ns()
        pods.restart(0)
        until(lambda: len(hostile.paths) >= 2, "the second announcement")
        pods.lead_to(pods.peer_ports[1])
    assert before < pods.life(0).number < time.time_ns()
    pods.check_both_work(packed[0])
