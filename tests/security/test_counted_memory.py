"""What a request makes a pod hold is bounded, and charged to who sends it: each attack alone against a small pod.

Held against what the pod promises: the peak of its resident set.
"""

from __future__ import annotations

import contextlib
import json
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.security.hostile_datasets import write_many_samples
from tests.waiting import until

from refill.protocol.wire_format import BatchRequest
from refill_service.demo.local_cluster import LocalCluster
from refill_service.serving.request_guard import ALWAYS_TAKEN_BYTES
from refill_service.settings import load_settings

Packed = tuple[str, dict[str, bytes]]
TOKENS = {"vision": "vision-0123456789abcdef", "speech": "speech-0123456789abcdef"}
GREEDY = {"authorization": f"Bearer {TOKENS['vision']}"}
VICTIM = {"authorization": f"Bearer {TOKENS['speech']}"}
MEMORY_BYTES = 16 << 20
MOST_LISTS = 1 << 14
"""In a report of a planned job."""
JSON = {"content-type": "application/json"}
READS_NOTHING = 1
"""The system makes it a few kilobytes."""
SHOWN = f"Authorization: Bearer {TOKENS['vision']}\r\n".encode()


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[LocalCluster]:
    (tmp_path / "tokens").mkdir()
    for team, token in TOKENS.items():
        (tmp_path / "tokens" / team).write_text(token)
    (tmp_path / "peers").write_text(f"pods-{TOKENS['vision']}")
    settings: dict[str, str | int | float] = {
        "memory_bytes": MEMORY_BYTES,
        "client_tokens": str(tmp_path / "tokens"),
        "peer_token": str(tmp_path / "peers"),
    }
    with LocalCluster(1, tmp_path, settings) as cluster:
        yield cluster


def peak_bytes(pod: LocalCluster) -> int:
    lines = Path(f"/proc/{pod.processes[0].pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) << 10


def receiving_bytes(pod: LocalCluster) -> float:
    lines = httpx.get(f"{pod.pod_urls[0]}/metrics", headers=VICTIM).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith('refill_resident_bytes{kind="receiving"}'))


def holds_its_promise(pod: LocalCluster) -> None:
    assert pod.processes[0].poll() is None
    peak, promised = peak_bytes(pod), load_settings(memory_bytes=MEMORY_BYTES).promised_bytes
    print(f"peak {peak >> 20} MiB of {promised >> 20} promised")
    assert peak < promised


@contextlib.contextmanager
def flood(pod: LocalCluster, count: int, sent: bytes, room_bytes: int | None = None) -> Iterator[None]:
    """So many connections, on each of which the pod is sent all that it takes: until it goes on answering and takes no
    more. They stay open, unread.

    :param room_bytes: what each takes of answers, about; None: what the system gives it.
    """
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.socket()) for _ in range(count)]
        for connection in connections:
            if room_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room_bytes)
            connection.connect(("127.0.0.1", pod.ports[0]))
            connection.setblocking(False)
        left = dict.fromkeys(connections, sent)
        idle_rounds = 0
        while left and idle_rounds < 3:
            before = sum(map(len, left.values()))
            for connection, rest in list(left.items()):
                try:
                    left[connection] = rest[connection.send(rest) :]
                except BlockingIOError:
                    continue
                except OSError:
                    left[connection] = b""
                if not left[connection]:
                    del left[connection]
            with httpx.Client(base_url=pod.pod_urls[0], headers=VICTIM, timeout=60) as victim:
                for _ in range(3):  # what lay in the pod's sockets before has been read by then
                    assert victim.get("/v1/pods").status_code == 200
            idle_rounds = idle_rounds + 1 if sum(map(len, left.values())) == before else 0
        yield


FLOODS: dict[str, tuple[int, bytes]] = {
    "many headers": (400, b"GET /v1/jobs HTTP/1.1\r\n" + b"a:\r\n" * 16_000),
    "headers that do not end": (3_000, b"GET /v1/jobs HTTP/1.1\r\na:" + b"x" * 60_000),
    "long addresses": (3_000, b"GET /" + b"x" * 60_000 + b" HTTP/1.1\r\na:"),
    "the next requests before the answer": (200, b"GET /v1/jobs HTTP/1.1\r\n\r\n" * 3_000),
    "the next requests of a team": (200, (b"GET /v1/jobs HTTP/1.1\r\n" + SHOWN + b"\r\n") * 3_000),
    "bodies of strangers": (2_500, b"PUT /v1/jobs/x HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 999_999),
    "bodies of a team": (
        2_000,
        b"PUT /v1/jobs/x HTTP/1.1\r\n" + SHOWN + b"Content-Length: 1000000\r\n\r\n" + b"x" * 999_999,
    ),
}


@pytest.mark.slow_attack
@pytest.mark.parametrize("attack", FLOODS.values(), ids=FLOODS)
def test_what_comes_is_held_within_bounds(pod: LocalCluster, attack: tuple[int, bytes]) -> None:
    with flood(pod, *attack):
        holds_its_promise(pod)
    until(lambda: receiving_bytes(pod) == 0, "nothing is held for connections that are gone")


@pytest.mark.slow_attack
def test_idle_connections_hold_nothing_of_their_last_request(pod: LocalCluster) -> None:
    """Of strangers, whose requests were answered."""
    with flood(pod, 2_500, b"GET /healthz?" + b"x" * 30_000 + b" HTTP/1.1\r\n\r\n"):
        until(lambda: receiving_bytes(pod) == 0, "all of them are answered")
        holds_its_promise(pod)


def register(pod: LocalCluster, name: str, **settings: Any) -> httpx.Response:
    return httpx.put(f"{pod.pod_urls[0]}/v1/jobs/{name}", headers=GREEDY, json=settings, timeout=60)


@pytest.fixture(params=["redox", "planned"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.slow_attack
def test_answers_that_nobody_reads_are_charged_to_who_asked(pod: LocalCluster, packed: Packed, policy: str) -> None:
    for number in range(25):
        found = register(pod, f"job-{number}", dataset=packed[0], memory_bytes=300_000, policy=policy)
        assert found.status_code == 200, found.text
    jobs = httpx.get(f"{pod.pod_urls[0]}/v1/jobs", headers=GREEDY)
    assert len(jobs.content) > ALWAYS_TAKEN_BYTES
    assert "metadata" not in jobs.json()[0], "of the dataset's index, megabytes perhaps for each job"
    ask = b"GET /v1/jobs HTTP/1.1\r\n" + SHOWN + b"\r\n"
    with flood(pod, 1_500, ask, READS_NOTHING):
        holds_its_promise(pod)


def test_lengths_are_counted_before_they_are_read(pod: LocalCluster, tmp_path: Path) -> None:
    """Of each request 0.8 MB are unread, and ten times as much is held for a moment."""
    count = 100_000
    url = write_many_samples(tmp_path / "bytes", count)
    registered = register(pod, "told", dataset=url, chunk_size=1000, policy="planned", memory_bytes=6_500_000)
    assert registered.status_code == 200, registered.text
    head = b"POST /v1/jobs/told/lengths HTTP/1.1\r\nContent-Length: 16\r\n" + SHOWN + b"\r\n"
    with flood(pod, 400, head + np.array([0, count], dtype="<i8").tobytes(), READS_NOTHING):
        holds_its_promise(pod)


@pytest.mark.variants("are whole")
@pytest.mark.parametrize("ends", ["stop", "are whole"])
def test_reports_of_planned_jobs_are_bounded_in_what_they_take_when_they_are_read(
    pod: LocalCluster, packed: Packed, ends: str
) -> None:
    """Each span takes thirty times its bytes."""
    registered = register(pod, "reported", dataset=packed[0], memory_bytes=1_000_000, policy="planned")
    about = {"plan": registered.json()["plan_id"]}
    url = f"{pod.pod_urls[0]}/v1/jobs/reported/planned/received"

    def report(num_spans: int) -> bytes:
        spans = ",".join(["[0,1]"] * num_spans)
        return f'{{"epoch": 0, "rank": 0, "num_ranks": 1, "spans": [{spans}]}}'.encode()

    as_many, too_many = report(MOST_LISTS - 2), report((512 << 10) // 6 - 20)
    for body, status in ((as_many, 200), (too_many, 413), (as_many, 200)):
        answer = httpx.put(url, params=about, content=body, headers=GREEDY | JSON, timeout=60)
        assert answer.status_code == status, answer.text
    path = f"/v1/jobs/reported/planned/received?plan={about['plan']}"
    for body in (as_many, too_many):
        head = f"PUT {path} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        with flood(pod, 100, head.encode() + SHOWN + b"\r\n" + (body[:-1] if ends == "stop" else body)):
            holds_its_promise(pod)
    until(lambda: receiving_bytes(pod) == 0, "nothing is held for connections that are gone")


def test_a_report_of_which_everything_is_wrong_is_refused_for_the_first_thing(
    pod: LocalCluster, packed: Packed
) -> None:
    """A kilobyte for each would be gigabytes, and seconds of the loop."""
    registered = register(pod, "reported", dataset=packed[0], memory_bytes=1_000_000, policy="planned")
    url = f"{pod.pod_urls[0]}/v1/jobs/reported/planned/received?plan={registered.json()['plan_id']}"
    body = b'{"epoch":0,"rank":0,"num_ranks":1,"spans":[' + b"1," * 250_000 + b"1]}"
    refused = httpx.put(url, content=body, headers=GREEDY | JSON, timeout=60)
    assert (refused.status_code, refused.json()["message"]) == (400, "body.spans.0: Input should be a valid tuple")
    holds_its_promise(pod)


def test_jobs_of_a_million_ranks_need_memory_for_them(pod: LocalCluster, packed: Packed) -> None:
    few = {"dataset": packed[0], "memory_bytes": 600_000, "policy": "redox"}
    for number in range(20):
        refused = register(pod, f"crowd-{number}", world_size=2**20, **few)
        assert (refused.status_code, refused.json()["error"]) == (400, "MemoryTooSmall")
        assert "1,048,576 ranks take 33," in refused.json()["message"]
    holds_its_promise(pod)


def test_planned_jobs_of_a_million_ranks_take_nothing_until_they_ask_and_are_refused_then(
    pod: LocalCluster, packed: Packed
) -> None:
    ranks = 2**20
    for number in range(5):
        few = {"dataset": packed[0], "memory_bytes": 600_000, "policy": "planned"}
        registered = register(pod, f"crowd-{number}", world_size=ranks, **few)
        assert registered.status_code == 200, registered.text
        about, path = {"plan": registered.json()["plan_id"]}, f"/v1/jobs/crowd-{number}/planned"
        asked = {"content": BatchRequest(0, ranks - 1, np.arange(1)).encode(), "params": about | {"ranks": ranks}}
        dealt = {"epoch": 0, "rank": ranks - 1, "num_ranks": ranks}
        requests: list[tuple[str, str, dict[str, Any]]] = [
            ("POST", "/batch", asked),
            ("PUT", "/received", {"json": dealt, "params": about}),
            ("GET", "", {"params": about | {"rank": ranks - 1, "life": "host:1:1:"}}),
        ]
        for method, what, more in requests:
            refused = httpx.request(method, pod.pod_urls[0] + path + what, headers=GREEDY, timeout=60, **more)
            assert (refused.status_code, refused.json()["error"]) == (400, "MemoryTooSmall"), (what, refused.text)
            assert "give it more memory_bytes" in refused.json()["message"]
    holds_its_promise(pod)


@pytest.mark.parametrize("policy", ["redox", "exact", "planned"])
def test_a_job_whose_tables_take_more_than_its_memory_is_refused(
    pod: LocalCluster, tmp_path: Path, policy: str
) -> None:
    """Two million samples of a byte: little data, two small requests, and gigabytes of tables."""
    url = write_many_samples(tmp_path / "bytes", 2_000_000)
    settings = {"dataset": url, "chunk_size": 1, "policy": policy, "memory_bytes": 8 << 20}
    refused = register(pod, "tables", **settings)
    assert (refused.status_code, refused.json()["error"]) == (400, "MemoryTooSmall")
    assert "its tables of 2,000,000 chunks" in refused.json()["message"]
    assert "chunk_size" in refused.json()["message"]
    holds_its_promise(pod)
    assert httpx.get(f"{pod.pod_urls[0]}/v1/jobs", headers=GREEDY).json() == []


@pytest.mark.variants("redox")
def test_a_long_url_is_refused_in_a_short_line_and_kept_by_nobody(
    pod: LocalCluster, packed: Packed, policy: str
) -> None:
    for number in range(40):
        refused = register(pod, f"long-{number}", dataset=packed[0] + "/." * 30_000, policy=policy)
        assert (refused.status_code, len(refused.content) < 1_000) == (400, True), refused.text[:200]
        for settings in ({"policy": "x" * 60_000}, {"x" * 60_000: 1}, {"chunk_size": "x" * 60_000}):
            refused = register(pod, f"long-{number}", **({"dataset": packed[0], "policy": policy} | settings))
            assert (refused.status_code, len(refused.content) < 5_000) == (400, True), refused.text[:200]
        refused = register(pod, f"long-{number}", dataset=packed[0] + "/." * 400_000, policy=policy)
        assert (refused.status_code, len(refused.content) < 1_000) == (413, True), refused.text[:200]
    holds_its_promise(pod)


def test_a_url_is_kept_in_its_normal_form(pod: LocalCluster, packed: Packed, policy: str) -> None:
    first = register(pod, "job", dataset=packed[0] + "/./././", policy=policy)
    assert first.json()["spec"]["dataset"] == packed[0]
    again = register(pod, "job", dataset=packed[0], policy=policy)
    assert again.status_code == 200, "it is the same place"


def test_what_another_pod_hands_over_is_unpacked_only_as_far_as_it_can_be_long(pod: LocalCluster) -> None:
    about = {"job": "x", "run": "y", "team": "", "pod": 0, "num_pods": 1, "ended_at": 1.0, "epochs": [0]}
    bomb = json.dumps(about).encode() + b"\n" + zlib.compress(b"\n" * (256 << 20), 9)
    assert len(bomb) < 1 << 20
    shown = {"authorization": f"Bearer pods-{TOKENS['vision']}"}
    with httpx.Client(http1=False, http2=True, headers=shown) as peer:
        url = f"http://127.0.0.1:{pod.peer_ports[0]}/peer/v1/jobs/x/ended"
        for _ in range(3):
            assert peer.put(url, content=bomb, timeout=60).status_code == 400
    holds_its_promise(pod)
