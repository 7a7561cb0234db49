"""Can a web page read from a pod on the machine of who looks at it? By a name for 127.0.0.1, or by its origin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.conftest import PortClaims

from refill.pods.credentials import Credentials
from refill.pods.pod_channel import PodChannel, Wait
from refill_service.demo.local_cluster import LocalCluster
from refill_service.serving.door import Door, PodNames
from refill_service.settings import load_settings

TOKEN = "vision-0123456789abcdef"
PATHS = ["/v1/jobs", "/healthz", "/metrics", "/docs", "/no/such/route"]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts a pod with these settings; all end with the module."""
    with ExitStack() as stack:

        def start(**settings: str | int | float) -> LocalCluster:
            folder = tmp_path_factory.mktemp("pod")
            return stack.enter_context(LocalCluster(1, folder, {"memory_bytes": "4MiB"} | settings))

        yield start


@pytest.fixture(scope="module")
def unix_socket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "pod.sock"


@pytest.fixture(scope="module")
def pod(started: Any, unix_socket: Path) -> LocalCluster:
    """On loopback, without tokens: a pod of `refill serve --pods`."""
    found: LocalCluster = started(unix_socket=unix_socket)
    return found


def ask(pod: LocalCluster, method: str = "GET", path: str = "/v1/jobs", **headers: str) -> httpx.Response:
    return httpx.request(method, pod.pod_urls[0] + path, headers=headers)


@pytest.mark.parametrize(
    "name",
    [
        "rebound.example",
        "rebound.example:8000",
        "10.0.0.1",
        "localhost.rebound.example",
        "127.0.0.1.nip.example",
        "pod",
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "DELETE"])
def test_a_name_that_leads_to_loopback_is_not_the_pods(pod: LocalCluster, name: str, method: str) -> None:
    for path in PATHS:
        answer = ask(pod, method, path, Host=name)
        assert (answer.status_code, answer.json()["error"]) == (403, "NotAllowed"), path
        assert "without client_tokens this pod answers to localhost" in answer.json()["message"]


@pytest.mark.parametrize("origin", ["http://rebound.example", "https://rebound.example:8000", "null", "", "http://["])
def test_a_page_of_another_origin_is_refused(pod: LocalCluster, origin: str) -> None:
    """It may ask for anything whose answer it does not want to read."""
    for path in PATHS:
        assert ask(pod, "POST", path, Origin=origin).status_code == 403


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost:8000", "LOCALHOST", "localhost.", "[::1]:80", "a.localhost"])
def test_names_of_loopback_are_the_pods(pod: LocalCluster, name: str) -> None:
    assert ask(pod, Host=name).status_code == 200
    assert ask(pod, Host=name, Origin=f"http://{name}").status_code == 200


def test_the_unix_socket_has_no_name(pod: LocalCluster, unix_socket: Path) -> None:
    answer = PodChannel(Credentials(), 2).call("GET", f"unix:{unix_socket}", "/v1/pods", Wait(10))
    assert answer["pods"] == pod.pod_urls


@pytest.mark.parametrize(("name", "status"), [("Laptop.example:8000", 200), ("laptop.example", 200), ("other", 403)])
def test_a_pod_answers_to_the_names_that_it_was_given(name: str, status: int) -> None:
    urls = {"pod_urls": "http://laptop.example:8000", "peer_urls": "http://laptop.example:8001"}
    settings = load_settings(host="127.0.0.1", **urls)
    door = Door(settings, lambda job: None, names=PodNames(settings))
    scope = {"path": "/", "method": "GET", "headers": [(b"host", name.encode())], "server": ("127.0.0.1", 8000)}
    refusal = door.admission(scope)
    assert (200 if refusal is None else refusal.status) == status


def test_a_pod_with_tokens_may_have_any_name(started: Any, tmp_path: Path) -> None:
    """No page has its token. Its port for metrics, which wants none, is for names of loopback there."""
    (tmp_path / "token").write_text(TOKEN)
    with_tokens = started(client_tokens=tmp_path / "token")
    shown = {"Host": "refill.example", "Origin": "http://any.example"}
    assert ask(with_tokens, **shown, Authorization=f"Bearer {TOKEN}").status_code == 200
    assert ask(with_tokens, **shown).status_code == 401


def test_a_pod_that_listens_for_other_machines_may_have_any_name(started: Any) -> None:
    """A page of another origin is refused there, too; one of the pod itself is not."""
    open_to_all = started(host="0.0.0.0")
    assert ask(open_to_all, Host="refill.training.svc").status_code == 200
    assert ask(open_to_all, Host="refill.training.svc", Origin="http://refill.training.svc").status_code == 200
    assert ask(open_to_all, "DELETE", Host="refill.training.svc", Origin="http://any.example").status_code == 403
    assert ask(open_to_all, "DELETE", Host="refill.training.svc", Origin="null").status_code == 403


def test_metrics_are_not_for_pages_either(started: Any) -> None:
    claims = PortClaims()
    (port,) = claims.take(1)
    started(metrics_port=port)
    for path in ("/metrics", "/readyz"):
        assert httpx.get(f"http://127.0.0.1:{port}{path}").status_code == 200
        assert httpx.get(f"http://127.0.0.1:{port}{path}", headers={"Host": "rebound.example"}).status_code == 403
    claims.give_back()
