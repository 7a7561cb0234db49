"""One team against the others, and strangers against all, at real pods: everybody gets in, and hears of their own."""

from __future__ import annotations

import contextlib
import socket
import ssl
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trustme
from tests.conftest import free_port
from tests.pod_fixtures import metric

from refill.pods.credentials import Credentials
from refill.pods.planned_connection import PlannedConnection
from refill.pods.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import BatchRequest
from refill_service.demo.local_cluster import LocalCluster

Packed = tuple[str, dict[str, bytes]]
TOKENS = {team: f"{team}-0123456789abcdef" for team in ("greedy", "speech", "vision")}
MEMORY_BYTES = 60 << 20
PART_BYTES = MEMORY_BYTES // 2 // len(TOKENS)
MOST_CONNECTIONS = 40


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("shared")
    (folder / "tokens").mkdir()
    for team, token in TOKENS.items():
        (folder / "tokens" / team).write_text(token)
    settings: dict[str, str | int | float] = {
        "memory_bytes": MEMORY_BYTES,
        "pinned_fraction": 0,
        "client_tokens": str(folder / "tokens"),
        "max_connections": MOST_CONNECTIONS,
        "team_max_jobs": 5,
    }
    with LocalCluster(1, folder, settings) as cluster:
        yield cluster


def shown(team: str) -> dict[str, str]:
    return {"authorization": f"Bearer {TOKENS[team]}"}


def ask(pod: LocalCluster, team: str, method: str = "GET", path: str = "/v1/jobs", **more: Any) -> httpx.Response:
    return httpx.request(method, pod.pod_urls[0] + path, headers=shown(team), timeout=60, **more)


@pytest.fixture
def register(pod: LocalCluster, packed: Packed) -> Iterator[Any]:
    """Registers jobs, which end with the test."""
    names: list[tuple[str, str]] = []

    def one(team: str, memory_bytes: int | None = None) -> httpx.Response:
        name = f"{team}-{uuid.uuid4().hex[:8]}"
        names.append((team, name))
        body: dict[str, Any] = {"dataset": packed[0], "chunk_size": 16}
        if memory_bytes is not None:
            body["memory_bytes"] = memory_bytes
        return ask(pod, team, "PUT", f"/v1/jobs/{name}", json=body)

    yield one
    for team, name in names:
        ask(pod, team, "DELETE", f"/v1/jobs/{name}")


def test_a_team_can_not_take_all_memory(register: Any) -> None:
    """Not with one job, nor with many that each take half of what is left."""
    assert register("greedy", MEMORY_BYTES).json()["error"] == "MemoryTooSmall"
    assert register("greedy", MEMORY_BYTES - 2 * PART_BYTES).status_code == 200
    assert register("greedy", 1 << 20).json()["error"] == "MemoryTooSmall"
    for team in ("speech", "vision"):
        found = register(team, PART_BYTES)
        assert found.status_code == 200, found.text


def test_a_team_that_names_its_memory_leaves_others_theirs(register: Any) -> None:
    """What is kept for it is in use, and not kept a second time: jobs that name no memory get half of their part."""
    taken = register("greedy", MEMORY_BYTES - 2 * PART_BYTES)
    assert taken.status_code == 200, taken.text
    for team in ("speech", "vision"):
        found = register(team)
        assert found.status_code == 200, found.text
        assert found.json()["memory_bytes"] > 0.49 * PART_BYTES


def test_a_refusal_names_no_job_of_another_team(register: Any) -> None:
    mine, theirs = register("speech", 4 << 20).json()["spec"]["name"], register("greedy", 20 << 20)
    refused = register("speech", MEMORY_BYTES).json()["message"]
    assert theirs.json()["spec"]["name"] not in refused
    assert "other teams 20,971,520" in refused
    assert f"{mine} 4,194,304" in refused


def test_metrics_that_a_team_sees_are_of_its_own_jobs(pod: LocalCluster, register: Any) -> None:
    names = {team: register(team, 4 << 20).json()["spec"]["name"] for team in ("speech", "vision")}
    seen = ask(pod, "speech", path="/metrics").text
    assert names["speech"] in seen
    assert names["vision"] not in seen


def test_a_team_can_not_have_all_jobs(register: Any) -> None:
    found = [register("greedy", 1 << 20) for _ in range(6)]
    assert [each.status_code for each in found] == [200] * 5 + [403]
    assert "team_max_jobs" in found[-1].json()["message"]
    assert register("speech", 1 << 20).status_code == 200


def test_a_team_can_not_read_look_at_or_end_the_planned_job_of_another(pod: LocalCluster, packed: Packed) -> None:
    """Nor its receipts when it has ended; and it can't take the name with a plan of its own."""
    name = f"speech-{uuid.uuid4().hex[:8]}"
    path = f"/v1/jobs/{name}"
    settings = {"dataset": packed[0], "chunk_size": 16, "memory_bytes": 4 << 20, "policy": "planned"}
    registered = ask(pod, "speech", "PUT", f"{path}/planned", json={"settings": settings})
    assert registered.status_code == 200, registered.text
    of_plan = {"plan": registered.json()["plan_id"]}
    report = {"epoch": 0, "rank": 0, "num_ranks": 1, "spans": [[0, 3]]}
    requests: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", path, {}),
        ("PUT", f"{path}/planned", {"json": {"settings": settings}}),
        ("PUT", f"{path}/planned", {"json": {"settings": settings, "plan": registered.json()["plan"], "begun": True}}),
        ("POST", f"{path}/planned/batch", {"params": of_plan, "content": BatchRequest(0, 0, np.arange(3)).encode()}),
        ("POST", f"{path}/planned/samples", {"params": of_plan, "content": np.arange(3, dtype="<i8").tobytes()}),
        ("POST", f"{path}/planned/chunks", {"params": of_plan, "content": np.array([0, 9], dtype="<i8").tobytes()}),
        ("POST", f"{path}/planned/warm", {"params": of_plan}),
        ("PUT", f"{path}/planned/received", {"params": of_plan, "json": report}),
        ("GET", f"{path}/planned", {"params": of_plan | {"rank": 0}}),
        ("GET", f"{path}/planned/epochs/0/ranks/0", {"params": of_plan | {"start": 0, "end": 3}}),
        ("GET", f"{path}/epochs/0", {}),
        ("GET", f"{path}/epochs/0/receipt", {}),
    ]
    for method, what, more in requests:
        refused = ask(pod, "vision", method, what, **more)
        assert (refused.status_code, refused.json()["error"]) == (403, "NotAllowed"), (method, what)
        answer = ask(pod, "speech", method, what, **more)
        assert answer.status_code == 200, (method, what, answer.text)
    assert ask(pod, "vision", "DELETE", path).status_code == 403
    assert name not in ask(pod, "vision", path="/v1/jobs").text + ask(pod, "vision", path="/metrics").text
    assert ask(pod, "speech", "DELETE", path).status_code == 200
    for what in (f"{path}/epochs/0/receipt", f"{path}/epochs/0"):
        assert ask(pod, "vision", path=what).status_code == 404, what
        assert ask(pod, "speech", path=what).status_code == 200, what


@pytest.mark.parametrize(("ended", "running"), [("planned", "planned"), ("redox", "redox"), ("planned", "redox")])
def test_who_takes_the_name_of_a_job_that_has_ended_takes_no_receipts_with_it(
    pod: LocalCluster, packed: Packed, tmp_path: Path, ended: str, running: str
) -> None:
    """Each team has those of its own runs of that name, and none of the other's."""
    name = f"shared-{uuid.uuid4().hex[:8]}"

    def delivers_one_batch(team: str, policy: str) -> PodConnection | PlannedConnection:
        token = tmp_path / team
        token.write_text(TOKENS[team])
        settings = {"name": name, "dataset": packed[0], "chunk_size": 16, "memory_bytes": 1 << 20, "policy": policy}
        kind = PlannedConnection if policy == "planned" else PodConnection
        shown = Credentials(token_file=str(token))
        rank = kind(pod.pod_urls[0], JobSpec.from_dict(settings), 0, None, 20, credentials=shown)
        rank.batch(0, np.arange(10 if team == "speech" else 20))
        return rank

    def seen(team: str) -> tuple[str, int]:
        """The run of the receipt, and how many samples it had. What was read for them may grow until it ends."""
        found = [ask(pod, team, path=f"/v1/jobs/{name}/epochs/0{what}") for what in ("/receipt", "")]
        assert [each.status_code for each in found] == [200, 200], [each.text for each in found]
        return found[0].json()["run"], found[1].json()["total"]["takes"]

    delivers_one_batch("speech", ended).end_job()
    of_speech = seen("speech")
    rank = delivers_one_batch("vision", running)
    of_vision = seen("vision")
    assert of_vision[1] != of_speech[1], "they have received another number of samples"
    assert seen("speech") == of_speech, "the name is another team's now, and the run is still its own"
    for team, theirs in (("speech", of_vision), ("vision", of_speech)):
        if of_vision[0] != of_speech[0]:  # a planned run is called by what was planned
            for what in ("", "/receipt"):
                refused = ask(pod, team, path=f"/v1/jobs/{name}/epochs/0{what}", params={"run": theirs[0]})
                assert refused.status_code in (403, 404), refused.text
    rank.end_job()
    assert (seen("speech"), seen("vision")) == (of_speech, of_vision)


def test_a_team_can_not_have_all_connections(pod: LocalCluster) -> None:
    """They are held open, each after a request; what is one too many is answered, and closed."""
    most = MOST_CONNECTIONS - 2 * (MOST_CONNECTIONS // 2 // len(TOKENS))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=pod.pod_urls[0], verify=False)) for _ in range(most + 5)]
        found = [client.get("/v1/pods", headers=shown("vision")).status_code for client in clients]
        assert found == [200] * most + [503] * 5
        others = [stack.enter_context(httpx.Client(base_url=pod.pod_urls[0], verify=False)) for _ in range(5)]
        for client in others:
            assert client.get("/v1/pods", headers=shown("speech")).status_code == 200
        assert httpx.get(f"{pod.pod_urls[0]}/readyz").status_code == 200
        assert clients[0].get("/v1/pods", headers=shown("vision")).status_code == 200, "who is known is not pushed out"


@pytest.mark.parametrize("said", ["", "GET /healthz HTTP/1.1\r\nHost: pod\r\n\r\n", "GET /v1/jobs HTTP/1.1\r\nHo"])
def test_connections_that_show_nobody_keep_nobody_out(pod: LocalCluster, said: str) -> None:
    """Silent ones, ones that ask for /healthz and stay, ones in the middle of their headers."""
    port = int(pod.pod_urls[0].rsplit(":", 1)[1])
    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(4 * MOST_CONNECTIONS):
            strangers.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)))
            strangers[-1].sendall(said.encode())
            if said.endswith("\r\n\r\n"):
                assert strangers[-1].recv(1 << 16), "it was answered, and stays"
        assert ask(pod, "speech").status_code == 200
        assert httpx.get(f"{pod.pod_urls[0]}/healthz").status_code == 200
        assert is_over(strangers[0]), "the oldest has given way"


def is_over(connection: socket.socket) -> bool:
    """Whether the pod ends it; waits for that."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def test_probes_of_a_port_of_their_own_get_through(tmp_path: Path) -> None:
    port = free_port()
    settings: dict[str, str | int | float] = {"memory_bytes": "4MiB", "metrics_port": port, "max_connections": 20}
    with LocalCluster(1, tmp_path, settings), contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
        for path in ("/healthz", "/readyz"):
            assert httpx.get(f"http://127.0.0.1:{port}{path}").status_code == 200
        assert metric(f"http://127.0.0.1:{port}", "refill_memory_budget_bytes") > 0


def test_handshakes_that_are_stuck_keep_nobody_out(tmp_path: Path) -> None:
    """Silent ones, and ones that have sent a half of their first message; the oldest give way."""
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    made.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    made.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    settings: dict[str, str | int | float] = {
        "memory_bytes": "4MiB",
        "tls_cert": str(tmp_path / "cert.pem"),
        "tls_key": str(tmp_path / "key.pem"),
    }
    with LocalCluster(1, tmp_path, settings, {"REFILL_CA_FILE": str(tmp_path / "ca.pem")}) as cluster:
        url, port = cluster.pod_urls[0], int(cluster.pod_urls[0].rsplit(":", 1)[1])
        descriptors = Path(f"/proc/{cluster.processes[0].pid}/fd")
        before = len(list(descriptors.iterdir()))
        with contextlib.ExitStack() as stack:
            stuck = []
            for number in range(400):
                stuck.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)))
                if number % 2:
                    stuck[-1].sendall(b"\x16\x03\x01\x02\x00\x01")
            trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
            assert httpx.get(f"{url}/v1/jobs", verify=trusted).status_code == 200
            assert is_over(stuck[0])
            assert len(list(descriptors.iterdir())) - before < 300
        assert httpx.get(f"{url}/healthz", verify=trusted).status_code == 200


def test_jobs_of_two_teams_do_not_read_for_each_other(pod: LocalCluster, packed: Packed, tmp_path: Path) -> None:
    """Not even with one read_seed: what a team reads, and when, is its own. Two jobs of a team do."""

    def rank_of(team: str, seed: int) -> PlannedConnection:
        spec = JobSpec(
            f"sweep-{uuid.uuid4().hex[:8]}",
            packed[0],
            seed=seed,
            read_seed=0,
            chunk_size=16,
            memory_bytes=4 << 20,
            num_epochs=1,
        )
        (tmp_path / team).write_text(TOKENS[team])
        return PlannedConnection(pod.pod_urls[0], spec, 0, None, 30, Credentials(token_file=str(tmp_path / team)))

    ranks = [rank_of("speech", 1), rank_of("vision", 2), rank_of("vision", 3)]
    for start in range(0, len(packed[1]), 40):
        for rank in ranks:
            rank.batch(0, np.arange(start, min(start + 40, len(packed[1]))))
    shared = [rank.epoch_counts(0)["total"]["bytes_shared"] for rank in ranks]
    for rank in ranks:
        rank.end_job()
    assert shared[:2] == [0, 0]
    assert shared[2] > 0
