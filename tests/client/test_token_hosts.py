"""Where does a token go, if a pod names any host as a pod's?"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import pytest
from tests.client.fake_pod import FakePod, serving, text_samples

from refill.errors import InvalidInput
from refill.pods.credentials import Credentials
from refill.pods.pod_connection import PodConnection
from refill.pods.token_hosts import TOKEN_HOSTS_VARIABLE, listed_hosts, may_be_shown
from refill.protocol.job_spec import JobSpec
from refill_service.commands.service_arguments import ask, client_of

TOKEN = "vision-0123456789abcdef"
IN_CLUSTER = ["ml.svc.cluster.local", "svc.cluster.local", "cluster.local"]
OF_CHART = "http://refill-0.refill-peers.ml.svc:8000"


@pytest.mark.parametrize(
    ("service", "pod", "searched"),
    [
        ("http://refill.ml.svc:8000", OF_CHART, []),
        ("http://refill.ml.svc.cluster.local:8000", OF_CHART, []),
        ("http://refill.ml:8000", OF_CHART, IN_CLUSTER),
        ("http://refill:8000", OF_CHART, IN_CLUSTER),
        ("http://refill:8000", "http://refill-0.refill-peers.ml.svc.cluster.local:8000", IN_CLUSTER),
        ("http://127.0.0.1:8000", OF_CHART, IN_CLUSTER),
        ("http://localhost:8000", OF_CHART, IN_CLUSTER),
        ("http://127.0.0.1:8000", "http://localhost:8010", []),
        ("http://[::1]:8000", "http://127.0.0.1:8010", []),
        ("http://10.0.0.1:8000", "http://10.0.0.1:8010", []),
        ("http://refill:8000", "http://refill-2.refill:8000", []),
        ("http://node1:8000", "http://node2:8000", []),
        ("https://cache.lab.example.org", "https://node-1.lab.example.org:8000", []),
        ("https://cache.example.org", "https://node-1.example.org:8000", []),
        ("https://cache.example.org", "https://Node-1.cache.example.org.:8000", []),
        ("http://cache.lab.example.org", "https://node-1.lab.example.org:8000", []),
    ],
)
def test_pods_of_the_services_own_domain_get_it(service: str, pod: str, searched: list[str]) -> None:
    assert may_be_shown(pod, service, [], searched)


@pytest.mark.parametrize(
    ("service", "pod", "searched"),
    [
        ("http://refill:8000", "http://taken.example:8000", IN_CLUSTER),
        ("http://refill:8000", "http://169.254.169.254", IN_CLUSTER),
        ("http://refill.ml.svc:8000", "http://refill-0.refill-peers.other.svc:8000", IN_CLUSTER),
        ("http://refill.ml:8000", "http://taken.ml:8000", IN_CLUSTER),
        ("http://refill.ml.svc:8000", "http://refill-0.taken-ml.svc:8000", IN_CLUSTER),
        ("http://refill.ml.svc:8000", "http://ml.svc.taken.example:8000", IN_CLUSTER),
        ("http://127.0.0.1:8000", "http://taken.example:8000", IN_CLUSTER),
        ("http://127.0.0.1:8000", "http://taken.example:8000", []),
        ("http://127.0.0.1:8000", "http://10.0.0.1:8000", []),
        ("http://10.0.0.1:8000", "http://10.0.0.2:8000", []),
        ("http://10.0.0.1:8000", "http://taken.0.0.1:8000", []),
        ("https://cache.example.org", "http://cache.example.org", []),
        ("https://cache.example.org", "https://cache.taken.org", []),
        ("https://cache.example.org", "https://takenexample.org", []),
        ("https://example.org", "https://taken.org", []),
        ("https://example.co.uk", "https://taken.co.uk", []),
        ("http://cache.lab.example.org", "http://refill", []),
        ("http://refill:8000", "http://taken.svc:8000", ["svc.cluster.local"]),
        *(
            (service, f"http://{pod}:8000", ["ml.svc.cluster.local", "svc.cluster.local", "cluster.local"])
            for service in ("http://refill:8000", "http://127.0.0.1:8000")
            for pod in ("taken.other.svc.cluster.local", "10-0-0-9.other.pod.cluster.local", "taken.cluster.local")
        ),
        (
            "http://refill:8000",
            "http://taken.other.svc.c1.example",
            ["ml.svc.c1.example", "svc.c1.example", "c1.example"],
        ),
    ],
)
def test_others_do_not(service: str, pod: str, searched: list[str]) -> None:
    assert not may_be_shown(pod, service, [], searched)


@pytest.mark.parametrize("listed", ["10.0.0.2", "x, nodes.example", " .Nodes.Example. ,", "a.nodes.example"])
def test_those_that_are_listed_get_it(listed: str) -> None:
    pod = "http://10.0.0.2:8000" if listed[0] == "1" else "http://a.nodes.example:8000"
    assert may_be_shown(pod, "https://cache.example.org", listed_hosts(listed), [])
    assert not may_be_shown("http://anodes.example", "https://cache.example.org", listed_hosts(listed), [])


@pytest.fixture
def token(tmp_path: Path) -> str:
    (tmp_path / "token").write_text(TOKEN)
    return str(tmp_path / "token")


def test_a_rank_whose_home_is_elsewhere_asks_the_service(
    token: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on, and says what to do."""
    spec = JobSpec(name="a", dataset="file:///x")
    with serving(FakePod(text_samples(4))) as elsewhere:
        named = elsewhere.url.replace("127.0.0.1", "127.0.0.1.nip.example")
        with serving(FakePod(text_samples(4), pods=[named])) as pod, caplog.at_level(logging.WARNING):
            connection = PodConnection(pod.url, spec, 0, None, 5, credentials=Credentials(token))
            assert connection.home == pod.url
            assert f"unless {TOKEN_HOSTS_VARIABLE} lists that host" in caplog.text
            pod.pods = [elsewhere.url]
            monkeypatch.setenv(TOKEN_HOSTS_VARIABLE, "127.0.0.1")
            assert PodConnection(pod.url, spec, 0, None, 5, credentials=Credentials(token)).home == elsewhere.url


def test_a_command_says_so(token: str) -> None:
    args = argparse.Namespace(url="http://127.0.0.1:9", token_file=token, ca_file=None)
    with client_of(args, 5) as client, pytest.raises(InvalidInput, match=r"names a pod at taken\.example"):
        ask(client, "GET", "http://taken.example:8000", "/v1/jobs")
