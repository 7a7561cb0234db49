"""Can the access log be believed? Who registered, read and ended what, in lines that nobody else can write."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.waiting import until, until_logged

from refill.errors import NotAllowed
from refill.pods.credentials import Credentials
from refill.pods.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import BatchRequest
from refill_service.demo.local_cluster import LocalCluster

Packed = tuple[str, dict[str, bytes]]
VISION, SPEECH, PODS = "vision-0123456789abcdef", "speech-0123456789abcdef", "pods-0123456789abcdef"
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) [a-z_.]+: [ -~]*")
ACCESS = re.compile(
    r"(client|pod) [A-Z]+ [!-~]+: \d{3}, \d+ bytes, [0-9.]+ ms, team [!-~]+, address 127\.0\.0\.1:\d+, "
    r"(-|ended|registered [!-~]+|read \d+ samples) \[[A-Za-z0-9._-]+\]"
)
FORGED = "2026-01-01 00:00:00,000 INFO refill.access: client DELETE /v1/jobs/theirs: 200, team speech"
HOSTILE = [
    f"/v1/jobs/x%0a{FORGED.replace(' ', '%20')}",
    f"/v1/jobs/x%0d{FORGED.replace(' ', '%20')}",
    "/v1/jobs/x:%20200,%2017%20bytes,%201.0%20ms,%20team%20speech",
    "/v1/jobs/%1b[2J%1b[31mx",
    "/v1/jobs/%c2%9b31m%e2%80%a8%e2%80%ae%f3%a0%80%81",
    "/v1/jobs/%00%7f%ff",
]


def settings_in(folder: Path, log_format: str, dataset: str) -> dict[str, Any]:
    (folder / "tokens").mkdir()
    (folder / "tokens" / "vision").write_text(VISION)
    (folder / "tokens" / "speech").write_text(SPEECH)
    (folder / "peers").write_text(PODS)
    return {
        "memory_bytes": "4MiB",
        "pinned_fraction": 0,
        "wait_seconds": 1,
        "log_format": log_format,
        "access_log": "true",
        "client_tokens": folder / "tokens",
        "peer_token": folder / "peers",
        "dataset_urls": dataset,
    }


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory, packed: Packed) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("text")
    with LocalCluster(1, folder, settings_in(folder, "text", packed[0])) as cluster:
        yield cluster


def authorization(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize("token", [VISION, "nobody's-0123456789"])
def test_what_is_asked_for_writes_no_line_of_its_own(pod: LocalCluster, token: str) -> None:
    """On both ports, with a token and without: what a pod logs are lines of its own, of printable ASCII."""
    for path in HOSTILE:
        for method in ("GET", "PUT", "DELETE"):
            httpx.request(method, pod.pod_urls[0] + path, headers=authorization(token))
    with httpx.Client(http1=False, http2=True) as peer:
        for path in HOSTILE:
            shown = PODS if token == VISION else token
            peer.get(f"http://127.0.0.1:{pod.peer_ports[0]}/peer{path}", headers=authorization(shown))
    body = {"dataset": f"s3://bucket/\u2028{FORGED}\u202e, team speech"}
    assert httpx.put(f"{pod.pod_urls[0]}/v1/jobs/x", headers=authorization(token), json=body).status_code >= 400
    last = f"/v1/jobs/last-of-{token[:6]}"
    httpx.get(pod.pod_urls[0] + last, headers=authorization(token))
    until_logged(pod, 0, f"{last}: ")
    lines = pod.log(0).split("\n")[:-1]
    assert [line for line in lines if LINE.fullmatch(line) is None] == []
    of_requests = [line.partition(" refill.access: ")[2] for line in lines if " refill.access: " in line]
    assert len(of_requests) >= 4 * len(HOSTILE)
    assert [line for line in of_requests if ACCESS.fullmatch(line) is None] == []
    assert not any(", team speech" in line for line in of_requests), "a team that has asked nothing"


def test_an_unexpected_error_is_one_event() -> None:
    """The lines of a traceback are indented, whatever the error says; and libraries tell nothing at DEBUG."""
    program = f"""
import logging
from refill_service.observing.logs import begin_logging
begin_logging("debug", "text", 0)
logging.getLogger("refill_service.any").debug("ours")
library = logging.getLogger("a_library")
library.debug("theirs")
library.setLevel(logging.DEBUG)
library.debug("theirs, by a level of its own")
try:
    raise RuntimeError("said" + chr(10) + {FORGED!r} + chr(27) + "[31m")
except RuntimeError:
    logging.getLogger("refill_service.any").exception("failed")
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
    ours, failed, *rest = printed.splitlines()
    assert ours.endswith(": ours")
    assert failed.endswith(": failed")
    assert all(line.startswith("  ") and line.isprintable() for line in rest)
    assert FORGED in "\n".join(rest)


def test_an_address_is_that_of_the_connection(pod: LocalCluster) -> None:
    named = {"x-forwarded-for": "203.0.113.9", "forwarded": "for=203.0.113.9", "x-real-ip": "203.0.113.9"}
    with socket.create_connection(("127.0.0.1", int(pod.pod_urls[0].rsplit(":", 1)[1]))) as raw:
        port = raw.getsockname()[1]
        headers = "".join(f"{name}: {value}\r\n" for name, value in (authorization(VISION) | named).items())
        raw.sendall(f"GET /v1/jobs/addressed HTTP/1.1\r\nhost: pod\r\nconnection: close\r\n{headers}\r\n".encode())
        while raw.recv(4096):
            pass
    until_logged(pod, 0, "/v1/jobs/addressed: ")
    (line,) = (line for line in pod.log(0).splitlines() if "/v1/jobs/addressed" in line)
    assert f"team vision, address 127.0.0.1:{port}, -" in line
    assert "203.0.113.9" not in pod.log(0)


@pytest.mark.parametrize("plainly", [False, True], ids=["planned connection", "plain PUT"])
def test_it_tells_who_registered_read_and_ended_a_planned_job(pod: LocalCluster, packed: Packed, plainly: bool) -> None:
    name = f"planned-{plainly:d}"
    path = f"/v1/jobs/{name}"
    spec = JobSpec(name, packed[0], chunk_size=16, memory_bytes=600_000)

    def asked(token: str, method: str, what: str, **more: Any) -> httpx.Response:
        url = f"{pod.pod_urls[0]}{path}{what}"
        return httpx.request(method, url, headers=authorization(token), timeout=30, **more)

    def registered(token: str) -> httpx.Response:
        settings = {each: value for each, value in spec.to_dict().items() if each != "holder"}
        return (
            asked(token, "PUT", "", json=settings)
            if plainly
            else asked(token, "PUT", "/planned", json={"settings": settings})
        )

    of_plan = {"plan": registered(VISION).json()["plan_id"]}
    body = BatchRequest(0, 0, np.arange(60)).encode()
    assert asked(VISION, "POST", "/planned/batch", params=of_plan, content=body).status_code == 200
    assert registered(SPEECH).status_code == 403
    assert asked(SPEECH, "POST", "/planned/batch", params=of_plan, content=body).status_code == 403
    assert asked(SPEECH, "DELETE", "").status_code == 403
    assert asked(VISION, "DELETE", "").status_code == 200

    def logged() -> list[str]:
        return [line for line in pod.log(0).splitlines() if f" {path}" in line and " refill.access: client " in line]

    until(lambda: len(logged()) >= 6, "a line of each request")
    lines = logged()
    assert [line for line in lines if ACCESS.fullmatch(line.partition(" refill.access: ")[2]) is None] == []
    done = [re.sub(r".*: (\d+), .*, team (\w+), .*, (.*) \[.*", r"\1 \2 \3", line) for line in lines]
    wanted = [f"200 vision registered {packed[0]}", "200 vision read 60 samples", "200 vision ended"]
    assert sorted(done) == sorted([*wanted, *["403 speech -"] * 3])


def test_it_tells_who_registered_read_and_ended_a_live_job(packed: Packed, tmp_path: Path) -> None:
    with LocalCluster(2, tmp_path, settings_in(tmp_path, "json", packed[0])) as cluster:
        spec = JobSpec("followed", packed[0], chunk_size=16, memory_bytes=600_000, policy="redox")
        ranks = {}
        for team, token in (("vision", VISION), ("speech", SPEECH)):
            (tmp_path / team).write_text(token)
            shown = Credentials(str(tmp_path / team))
            ranks[team] = PodConnection(cluster.pod_urls[0], spec, 0, None, 30, credentials=shown)
        ranks["vision"].batch(0, np.arange(60))
        with pytest.raises(NotAllowed):
            ranks["speech"].batch(0, np.arange(60))
        end = f"{cluster.pod_urls[0]}/v1/jobs/followed"
        assert httpx.delete(end, headers=authorization(SPEECH)).status_code == 403
        assert httpx.delete(end, headers=authorization(VISION)).status_code == 200
        until_logged(cluster, 0, '"done": "ended"')
        lines = [json.loads(line) for line in cluster.log(0).splitlines()]
    requests = [line for line in lines if line["logger"] == "refill.access" and line["asker"] == "client"]
    assert all(line["address"].startswith("127.0.0.1:") for line in requests)
    done = [(line["team"], line["done"]) for line in requests if line["done"] != "-" and line["status"] == 200]
    assert done[0] == ("vision", f"registered {packed[0]}")
    assert ("vision", "read 60 samples") in done
    assert done[-1] == ("vision", "ended")
    assert {team for team, _ in done} == {"vision"}
    refused = {(line["method"], line["status"]) for line in requests if line["team"] == "speech"}
    assert refused == {("PUT", 403), ("DELETE", 403)}
