"""A home that is a pod of another service is refused: reports would go there, and receipts would lack them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.client.conftest import NUM_SAMPLES, DatasetOf
from tests.client.fake_pod import FakePod, serving, text_samples

from refill.errors import InvalidInput

POLICIES = pytest.mark.parametrize("policy", ["planned", "redox"])
GONE = "http://127.0.0.1:9"


@pytest.fixture
def home() -> Iterator[FakePod]:
    with serving(FakePod(text_samples(NUM_SAMPLES))) as running:
        yield running


@POLICIES
@pytest.mark.parametrize("have_names", [True, False])
def test_a_pod_of_another_service(
    pod: FakePod, home: FakePod, dataset_of: DatasetOf, policy: str, have_names: bool
) -> None:
    if not have_names:  # as one that runs alone
        pod.pods = home.pods = []
    with pytest.raises(InvalidInput, match=f"^home={home.url} is no pod of the service {pod.url}, .*Leave home= out"):
        dataset_of(policy=policy, home=home.url).register()
    assert not home.jobs, "it was brought the job"


@POLICIES
def test_a_pod_of_the_service_by_another_name(pod: FakePod, home: FakePod, dataset_of: DatasetOf, policy: str) -> None:
    """While it grows, its pods know other numbers of them."""
    pod.pods, home.pods = [pod.url, GONE], [GONE]
    dataset_of(policy=policy, home=home.url).register()
    pod.pods = home.pods = []
    home.jobs, home.plan_ids = pod.jobs, pod.plan_ids
    dataset_of(policy=policy, home=home.url).register()


@POLICIES
def test_one_that_does_not_answer_may_be_one(dataset_of: DatasetOf, policy: str) -> None:
    dataset_of(policy=policy, home=GONE).register()


@POLICIES
def test_what_is_no_pod_at_all(dataset_of: DatasetOf, policy: str) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(InvalidInput, match=f"^home={url} is no pod of the service .* answered with status 404"):
            dataset_of(policy=policy, home=url).register()
        server.shutdown()


def test_a_home_that_is_not_shown_the_token(
    dataset_of: DatasetOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REFILL_TOKEN", "token-0123456789abcdef")
    dataset_of(policy="planned", home="http://pod.example.org:8000").register()
    assert "home pod http://pod.example.org:8000 is of another domain than" in caplog.text


def test_a_socket_of_this_machine_is_shown_it(
    pod: FakePod, dataset_of: DatasetOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REFILL_TOKEN", "token-0123456789abcdef")
    monkeypatch.setattr("refill.pods.pod_channel.PodChannel.may_ask", lambda *_: False)
    dataset = dataset_of(policy="planned", home="unix:/run/nowhere/refill.sock")
    assert dataset.connection.home == "unix:/run/nowhere/refill.sock"
    assert not caplog.text
