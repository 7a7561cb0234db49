"""What ``helm test`` runs passes on pods that work, and says in one line what is wrong with others."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from tests.conftest import free_port
from tests.helm.conftest import Secured
from tests.helm.mounted_secrets import TOKENS
from tests.helm.rendering import release

from refill_service.demo.local_cluster import LocalCluster


def check(
    url: str, num_pods: int, dataset: str, tokens: str = "", ca: str = "", patience: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """The test pod's command, with these in place of its own arguments. Without ``patience`` it has a minute."""
    (container,) = release({"dataset": {"url": "s3://bucket/images"}}).the("Pod")["spec"]["containers"]
    assert container["command"] == ["python", "-c"]
    script, *arguments = container["args"]
    assert arguments == ["http://refill.ml.svc:8000", "3", "s3://bucket/images", "", ""]
    command = [sys.executable, "-I", "-c", script, url, str(num_pods), dataset, tokens, ca, *patience]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_pods_that_read_the_dataset_pass(three_pods: LocalCluster, packed: tuple[str, dict[str, bytes]]) -> None:
    url = three_pods.pod_urls[0]
    before = httpx.get(f"{url}/v1/jobs").json()
    result = check(url, 3, packed[0])
    assert (result.returncode, result.stderr) == (0, "")
    for pod_url in three_pods.pod_urls:
        assert f"{pod_url} is ready and has read its part of the index" in result.stdout
    assert f"{packed[0]} has 1,000 samples" in result.stdout
    assert httpx.get(f"{url}/v1/jobs").json() == before, "the test's job is gone"


def test_without_a_dataset_the_pods_alone_are_checked(three_pods: LocalCluster) -> None:
    result = check(three_pods.pod_urls[1], 3, "")
    assert result.returncode == 0
    assert "no dataset was read" in result.stdout


def test_a_dataset_that_is_not_there_fails(three_pods: LocalCluster, tmp_path: Path) -> None:
    assert_fails(check(three_pods.pod_urls[0], 3, tmp_path.as_uri()), f"{tmp_path.as_uri()}")


@dataclass
class TestPod:
    """What `helm test` makes of a release with tokens and TLS, with its Secrets in a folder."""

    __test__ = False
    url: str
    dataset: str
    tokens: Path
    ca: Path

    def check(self) -> subprocess.CompletedProcess[str]:
        return check(self.url, 3, self.dataset, str(self.tokens), str(self.ca))


@pytest.fixture
def test_pod(secured_pods: Secured, tmp_path: Path) -> TestPod:
    spec = secured_pods.release.the("Pod")["spec"]
    _, url, pods, dataset, tokens, ca = spec["containers"][0]["args"]
    assert (url, pods) == ("https://refill.ml.svc:8000", "3")
    root = secured_pods.mounts_of(spec, tmp_path)
    return TestPod(secured_pods.running.pod_urls[0], dataset, Path(f"{root}{tokens}"), Path(f"{root}{ca}"))


def test_pods_with_tokens_and_tls_pass_by_what_the_test_pod_mounts(test_pod: TestPod) -> None:
    (test_pod.tokens / "..data").mkdir()  # as Kubernetes has it
    result = test_pod.check()
    assert (result.returncode, result.stderr) == (0, "")
    assert f"{test_pod.dataset} has 1,000 samples" in result.stdout
    for token in TOKENS.values():
        assert token not in result.stdout


def test_a_token_that_the_pods_do_not_know_fails(test_pod: TestPod) -> None:
    for token in test_pod.tokens.iterdir():
        token.write_text("nobody's-0123456789\n")
    assert_fails(test_pod.check(), "takes only requests with a token that it knows")


def test_a_secret_of_tokens_without_any_fails(test_pod: TestPod) -> None:
    for token in test_pod.tokens.iterdir():
        token.unlink()
    assert_fails(test_pod.check(), "the Secret of access.clientTokens is empty")


def test_without_its_authority_a_certificate_is_checked_against_the_systems(test_pod: TestPod) -> None:
    test_pod.ca.unlink()
    assert_fails(test_pod.check(), "certificate verify failed")


def test_an_authority_that_is_no_certificate_fails(test_pod: TestPod) -> None:
    test_pod.ca.write_text("ca.crt\n")
    assert_fails(test_pod.check(), "holds no certificates")


def test_pods_of_another_number_fail(three_pods: LocalCluster) -> None:
    assert_fails(check(three_pods.pod_urls[0], 5, "", patience=("0",)), "a pod knows of 3 pods, and there are to be 5")


@pytest.mark.parametrize("dataset", ["", "s3://bucket/images"])
def test_a_service_that_does_not_answer_fails(dataset: str) -> None:
    assert_fails(check(f"http://127.0.0.1:{free_port()}", 3, dataset, patience=("0",)), "Connection refused")


@contextmanager
def a_service_that_answers(*answers: tuple[int, object]) -> Iterator[tuple[str, list[str]]]:
    """Its URL, and what it was asked. ``answers``: status and JSON of each, status 0: the connection is cut."""
    coming, asked = list(answers), list[str]()

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, said = coming.pop(0)
            if status:
                body = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


def test_a_release_that_was_just_installed_is_waited_for() -> None:
    starting, fewer, all_of_them = ({"status": "starting", "pods": 3}, {"pods": 2}, {"pods": 3})
    with a_service_that_answers((0, None), (503, starting), (200, fewer), (200, all_of_them)) as (url, asked):
        result = check(url, 3, "")
    assert (result.returncode, result.stderr) == (0, "")
    assert asked == 4 * ["/readyz"]
    waits = [line for line in result.stdout.splitlines() if line.startswith("waiting, for ")]
    whys = ["Remote end closed connection", "HTTP Error 503", "a pod knows of 2 pods, and there are to be 3"]
    assert len(waits) == len(whys)
    assert all(why in line for why, line in zip(whys, waits, strict=True))


@pytest.mark.variants("400", "404", "409")
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 500])
def test_what_is_refused_is_not_asked_again(status: int) -> None:
    with a_service_that_answers((status, {"message": "no, because"})) as (url, asked):
        assert_fails(check(url, 3, ""), "no, because")
    assert asked == ["/readyz"]


def assert_fails(result: subprocess.CompletedProcess[str], why: str) -> None:
    assert result.returncode == 1
    assert result.stderr.startswith("wrong: ")
    assert result.stderr.count("\n") == 1
    assert why in result.stderr
    assert "waiting" not in result.stdout
