"""Who may do what, at real pods: tokens of clients and pods, TLS with certificates of both, a port for metrics."""

from __future__ import annotations

import os
import shutil
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trustme
from tests.conftest import free_port
from tests.forked_processes import run_refill
from tests.held_connections import holder_folder, holders
from tests.pod_fixtures import NUM_SAMPLES, kind_of, metric, whole_epoch
from tests.refill_command import refill_says
from tests.waiting import until

from refill.errors import InvalidInput, NotAllowed, PodUnreachable
from refill.pods.credentials import Credentials
from refill.pods.planned_connection import PlannedConnection
from refill.pods.pod_connection import PodConnection
from refill.pods.pod_link import PodLink
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import BatchRequest, encode_together
from refill_service.demo.local_cluster import LocalCluster

__all__ = ["holder_folder"]

Packed = tuple[str, dict[str, bytes]]
VISION, SPEECH, PODS = "vision-0123456789abcdef", "speech-0123456789abcdef", "pods-0123456789abcdef"


@dataclass
class Secured:
    """Three pods with all that keeps others out, and the files of it."""

    cluster: LocalCluster
    folder: Path

    def token_file(self, holder: str | None) -> str:
        file = self.folder / f"client-{holder}"
        file.write_text({"vision": VISION, "speech": SPEECH, None: "nobody's-0123456789"}[holder])
        return str(file)

    def credentials(self, holder: str | None) -> Credentials:
        return Credentials(self.token_file(holder), str(self.folder / "ca.pem"))

    def rank(self, holder: str | None, job: dict[str, Any], home: int | None = None) -> Any:
        url = None if home is None else self.cluster.pod_urls[home]
        spec = JobSpec.from_dict(job)
        kind = kind_of(spec)
        return kind(self.cluster.pod_urls[1], spec, 0, url, 5, credentials=self.credentials(holder))

    def get(
        self, path: str, holder: str | None = None, method: str = "GET", pod: int = 0, json: Any = None
    ) -> httpx.Response:
        found = self.credentials(holder)
        headers = {} if holder is None else found.headers()
        url = f"{self.cluster.pod_urls[pod]}{path}"
        return httpx.request(method, url, headers=headers, verify=found.ssl_context(), timeout=10, json=json)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def write_certificate(authority: trustme.CA, folder: Path) -> None:
    """Signed for 127.0.0.1, as a server's and a client's."""
    certificate = authority.issue_cert("127.0.0.1", common_name="refill")
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    write_certificate(authority, folder)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    (folder / "tokens").mkdir()
    (folder / "tokens" / "vision").write_text(VISION + "\n")
    (folder / "tokens" / "speech").write_text(SPEECH + "\n")
    (folder / "tokens" / "..data").mkdir()  # as Kubernetes has it
    (folder / "peers").write_text(PODS)
    settings = {
        "memory_bytes": "4MiB",
        "pinned_fraction": 0,
        "wait_seconds": 1,
        "client_tokens": folder / "tokens",
        "peer_token": folder / "peers",
        "tls_cert": folder / "cert.pem",
        "tls_key": folder / "key.pem",
        "peer_tls_cert": folder / "cert.pem",
        "peer_tls_key": folder / "key.pem",
        "peer_tls_ca": folder / "ca.pem",
    }
    given = {name: str(value) for name, value in settings.items()}
    with LocalCluster(3, folder, dict(given), {"REFILL_CA_FILE": str(folder / "ca.pem")}) as cluster:
        yield Secured(cluster, folder)


@pytest.fixture
def job(secured: Secured, packed: Packed, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    name = f"{request.node.originalname}-{time.monotonic_ns()}"
    yield {"name": name, "dataset": packed[0], "chunk_size": 16, "memory_bytes": 600_000}
    for holder in ("vision", "speech"):
        secured.get(f"/v1/jobs/{name}", holder, method="DELETE")


def test_an_epoch_with_tokens_and_tls_on_all_ways(secured: Secured, job: dict[str, Any]) -> None:
    batches = whole_epoch(secured.rank("vision", job), 0)
    assert sorted(i for batch in batches for i in batch.sample_ids.tolist()) == list(range(NUM_SAMPLES))
    path = f"/v1/jobs/{job['name']}/epochs/0/receipt"
    until(lambda: bool(secured.get(path, "vision").json()["exact"]), "an exact receipt")


def test_a_command_in_a_pod_asks_that_pod_by_tls(secured: Secured, job: dict[str, Any], tmp_path: Path) -> None:
    """With a team's token and the pod's own environment alone, as ``kubectl exec`` starts it."""
    secured.rank("vision", job).info()
    shutil.copy(secured.folder / "ca.pem", tmp_path / "ca.crt")
    for file in ("cert.pem", "key.pem"):
        shutil.copy(secured.folder / file, tmp_path / file)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "REFILL_TLS_CERT": str(tmp_path / "cert.pem"),
        "REFILL_TLS_KEY": str(tmp_path / "key.pem"),
        "REFILL_POD_URLS": ",".join(secured.cluster.pod_urls),
        "REFILL_PEER_URLS": "https://a:1,https://b:1,https://c:1",
        "REFILL_PEER_TLS_CERT": str(tmp_path / "cert.pem"),
        "REFILL_PEER_TLS_KEY": str(tmp_path / "key.pem"),
        "REFILL_PEER_TLS_CA": str(tmp_path / "ca.crt"),
        "REFILL_ORDINAL": "1",
    }
    done = run_refill(["jobs", "--token-file", secured.token_file("vision")], environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert job["name"] in done.stdout


CLOSED = [("GET", path) for path in ("/v1/jobs", "/metrics", "/docs", "/openapi.json", "/nothing")]
CLOSED += [("PUT", "/v1/jobs/x"), ("POST", "/v1/jobs/x/batch")]


@pytest.mark.parametrize("authorization", [None, "Bearer nobody's-0123456789", f"Basic {VISION}", "Bearer"])
def test_without_a_token_that_the_pod_knows(secured: Secured, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    context = secured.credentials(None).ssl_context()
    to_do = "yours is none of them: is it whole" if "nobody" in (authorization or "") else "give REFILL_TOKEN_FILE"
    with httpx.Client(base_url=secured.cluster.pod_urls[0], headers=headers, verify=context) as client:
        for method, path in CLOSED:
            answer = client.request(method, path)
            assert answer.status_code == 401, answer.text
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"] == "NotAuthenticated"
            assert to_do in answer.json()["message"]
    assert secured.get("/healthz").status_code == secured.get("/readyz").status_code == 200


@pytest.mark.parametrize("policy", ["redox", "planned"])
def test_a_job_is_its_holders_alone(secured: Secured, job: dict[str, Any], policy: str) -> None:
    job |= {"policy": policy}
    mine = secured.rank("vision", job)
    mine.batch(0, np.arange(20))
    path = f"/v1/jobs/{job['name']}"
    for pod in range(3):
        for what in ("", "/epochs/0", "/epochs/0/receipt", "/ranks/0"):
            answer = secured.get(path + what, "speech", pod=pod)
            assert (answer.status_code, answer.json()["error"]) == (403, "NotAllowed"), what
        assert secured.get(path, "speech", method="DELETE", pod=pod).status_code == 403
        assert job["name"] not in [each["spec"]["name"] for each in secured.get("/v1/jobs", "speech", pod=pod).json()]
        assert job["name"] in [each["spec"]["name"] for each in secured.get("/v1/jobs", "vision", pod=pod).json()]
        with pytest.raises(NotAllowed, match="belongs to another token"):
            secured.rank("speech", job, home=pod).batch(0, np.arange(20))
        named = f"/v1/jobs/{job['name']}?incarnation={mine.info()['incarnation']}"
        again = secured.get(named, "speech", method="PUT", pod=pod, json={"dataset": job["dataset"]})
        assert again.status_code == 403, "whoever knows the name of a run may register it"
    with pytest.raises(NotAllowed):
        secured.rank("speech", job | {"holder": "vision"}).info()
    assert len(mine.batch(0, np.arange(20)).sample_ids) == 20, "the attempts have ended it"


def test_batches_of_several_jobs_are_their_holders_alone(secured: Secured, job: dict[str, Any]) -> None:
    mine = secured.rank("vision", job)
    mine.batch(0, np.arange(20))
    path = f"/v1/jobs/{job['name']}/planned/batch?plan={mine.plan_id}"
    body = encode_together([(path, BatchRequest(0, 0, np.arange(20)).encode())])
    for holder, status in (("vision", 200), ("speech", 403), (None, 401)):
        headers = secured.credentials(holder).headers()
        url = f"{secured.cluster.pod_urls[0]}/v1/batches"
        ssl = secured.credentials(holder).ssl_context()
        answer = httpx.post(url, headers=headers, verify=ssl, timeout=10, content=body)
        assert answer.status_code == status, answer.text


def test_by_way_of_the_connection_holder_everybody_shows_a_token_of_his_own(
    secured: Secured, job: dict[str, Any], holder_folder: Path
) -> None:
    """One process has the connections of both."""
    spec = JobSpec.from_dict(job | {"policy": "planned"})
    vision, speech = (
        PlannedConnection(secured.cluster.pod_urls[1], spec, 0, None, 60, secured.credentials(holder))
        for holder in ("vision", "speech")
    )
    assert len(vision.batch(0, np.arange(50)).sample_ids) == 50
    for _ in range(2):
        with pytest.raises(NotAllowed, match="belongs to another token"):
            speech.batch(0, np.arange(50))
        assert len(vision.batch(0, np.arange(50, 100)).sample_ids) == 50
    assert len(holders(holder_folder)) == 1
    vision.end_job()


def test_who_comes_again_goes_on_with_the_tls_session(secured: Secured, tmp_path: Path) -> None:
    trusted = tmp_path / "ca.pem"  # of this test alone: sessions are kept for who trusts the same
    shutil.copy(secured.folder / "ca.pem", trusted)
    were_resumed = []
    for pod in (0, 0, 0, 1, 1):
        link = PodLink(secured.cluster.pod_urls[pod], Credentials(ca_file=str(trusted)), 2)
        link.send_request("GET", "/healthz", b"", {}, 20)
        answer = link.getresponse()
        link.has_answered()
        assert answer.status == 200
        were_resumed.append(link.was_resumed)
        link.close()
    assert were_resumed == [False, True, True, False, True], "a ticket is one pod's"
    shutil.copy(secured.folder / "ca.pem", tmp_path / "new.pem")
    (tmp_path / "new.pem").replace(trusted)
    link = PodLink(secured.cluster.pod_urls[0], Credentials(ca_file=str(trusted)), 2)
    link.send_request("GET", "/healthz", b"", {}, 20)
    assert not link.was_resumed, "what is trusted now was not asked"
    link.close()


def test_receipts_of_a_run_that_ended_are_its_holders_alone(secured: Secured, job: dict[str, Any]) -> None:
    """Its name is free then, and still no other team is told that there was such a run."""
    mine = secured.rank("vision", job)
    whole_epoch(mine, 0)
    mine.end_job()
    path = f"/v1/jobs/{job['name']}/epochs/0"
    for pod in range(3):
        assert secured.get(f"{path}/receipt", "vision", pod=pod).json()["exact"]
        for run in ("", f"?run={mine.info()['incarnation']}"):
            for what in (path, f"{path}/receipt"):
                answer = secured.get(what + run, "speech", pod=pod)
                assert (answer.status_code, answer.json()["error"]) == (404, "UnknownJob"), what
        assert job["name"] in [run["job"] for run in secured.get("/v1/runs", "vision", pod=pod).json()]
        assert job["name"] not in secured.get("/v1/runs", "speech", pod=pod).text


def test_it_stays_so_when_pods_were_restarted(secured: Secured, job: dict[str, Any]) -> None:
    """All but one at the same time: it tells the others."""
    mine = secured.rank("vision", job)
    before = mine.batch(0, np.arange(40)).sample_ids
    for pod in (1, 2):
        secured.cluster.kill(pod)
    for pod in (1, 2):
        secured.cluster.restart(pod)
    for pod in range(3):
        with pytest.raises(NotAllowed):
            secured.rank("speech", job, home=pod).info()
        assert secured.get(f"/v1/jobs/{job['name']}", "speech", method="DELETE", pod=pod).status_code == 403
    assert mine.batch(0, np.arange(40)).sample_ids.tolist() == before.tolist()


@pytest.mark.parametrize("command", [["receipt", "{job}", "0", "--url", "{url}"], ["top", "{url}", "--once"]], ids=str)
def test_commands_show_a_token(secured: Secured, job: dict[str, Any], command: list[str]) -> None:
    whole_epoch(secured.rank("vision", job), 0)
    path = f"/v1/jobs/{job['name']}/epochs/0/receipt"
    until(lambda: bool(secured.get(path, "vision").json()["exact"]), "an exact receipt")
    asked = [part.format(job=job["name"], url=secured.cluster.pod_urls[0]) for part in command]
    files = ["--token-file", secured.token_file("vision"), "--ca-file", str(secured.folder / "ca.pem")]
    found = run_refill([*asked, *files])
    assert found.returncode == 0, found.stderr
    assert job["name"] in found.stdout
    refused = run_refill([*asked, *files[2:]])
    assert refused.returncode != 0
    assert "REFILL_TOKEN_FILE" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1, refused.stderr


def test_between_pods_a_certificate_and_a_token_are_wanted(secured: Secured) -> None:
    port = secured.cluster.peer_ports[0]
    url = f"https://127.0.0.1:{port}/peer/v1/jobs/x"
    with pytest.raises(httpx.TransportError):
        httpx.get(url, verify=secured.credentials(None).ssl_context(), headers={"authorization": f"Bearer {PODS}"})
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{port}/peer/v1/jobs/x")
    shown = secured.credentials(None).ssl_context()
    shown.load_cert_chain(secured.folder / "cert.pem", secured.folder / "key.pem")
    with httpx.Client(verify=shown, http1=False, http2=True) as client:
        unknown = client.get(url)
        assert (unknown.status_code, "the same peer_token" in unknown.text) == (401, True)
        assert client.get(url, headers={"authorization": f"Bearer {VISION}"}).status_code == 401
        found = client.get(url, headers={"authorization": f"Bearer {PODS}"})
        assert (found.status_code, found.http_version) == (404, "HTTP/2")


def test_a_client_does_not_talk_to_a_pod_that_it_does_not_trust(secured: Secured, job: dict[str, Any]) -> None:
    strangers = Credentials(secured.token_file("vision"))
    spec = JobSpec.from_dict(job)
    rank = kind_of(spec)(secured.cluster.pod_urls[0], spec, 0, None, 0, credentials=strangers)
    with pytest.raises(PodUnreachable, match="certificate verify failed"):
        rank.info()


def test_tokens_and_certificates_may_be_replaced(
    packed: Packed, tmp_path: Path, authority: trustme.CA, job: dict[str, Any]
) -> None:
    """The client's token file changes as a Secret does, and what it had is still taken for a while."""
    write_certificate(authority, tmp_path)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    (tmp_path / "tokens").write_text(VISION)
    settings: dict[str, Any] = {
        "memory_bytes": "4MiB",
        "client_tokens": str(tmp_path / "tokens"),
        "tls_cert": str(tmp_path / "cert.pem"),
        "tls_key": str(tmp_path / "key.pem"),
        "peer_tls_cert": str(tmp_path / "cert.pem"),
        "peer_tls_key": str(tmp_path / "key.pem"),
        "peer_tls_ca": str(tmp_path / "ca.pem"),
    }
    with LocalCluster(2, tmp_path, settings, {"REFILL_CA_FILE": str(tmp_path / "ca.pem")}) as cluster:
        url = cluster.pod_urls[0]
        context = Credentials(ca_file=str(tmp_path / "ca.pem")).ssl_context()

        def answers_to(token: str) -> int:
            return httpx.get(f"{url}/v1/jobs", headers={"authorization": f"Bearer {token}"}, verify=context).status_code

        assert (answers_to(VISION), answers_to(SPEECH)) == (200, 401)
        (tmp_path / "tokens").write_text("")

        def is_seen() -> bool:
            assert answers_to(VISION) == 200, "a file that is being replaced has shut everybody out"
            return "holds no token any more" in cluster.log(0)

        until(is_seen, "the pod's word of a file without tokens")
        assert answers_to(VISION) == 200, "a file that is being replaced has shut everybody out"
        (tmp_path / "tokens").write_text(SPEECH)
        until(lambda: answers_to(SPEECH) == 200, "the new token")
        assert answers_to(VISION) == 200, "the old one is not taken any more, which others may still show"

        shown = [ssl.get_server_certificate(("127.0.0.1", port)) for port in ports_of(cluster)]
        mine = Credentials(str(tmp_path / "tokens"), str(tmp_path / "ca.pem"))
        spec = JobSpec.from_dict(job)
        rank = kind_of(spec)(url, spec, 0, None, 20, credentials=mine)
        first = rank.batch(0, np.arange(100)).sample_ids.tolist()
        write_certificate(authority, tmp_path)
        until(
            lambda: ssl.get_server_certificate(("127.0.0.1", ports_of(cluster)[0])) != shown[0], "the new certificate"
        )
        until(lambda: "starts anew" in cluster.log(1) and "starts anew" in cluster.log(0), "both pods' word of it")
        rest = rank.batch(0, np.arange(100, NUM_SAMPLES)).sample_ids.tolist()
        assert sorted(first + rest) == list(range(NUM_SAMPLES))


def test_a_pod_whose_token_another_one_does_not_know_yet_is_waited_for(packed: Packed, tmp_path: Path) -> None:
    """A Secret that was replaced reaches one node before another. Training does not end by that."""
    (tmp_path / "peers-0").write_text(PODS)
    (tmp_path / "peers-1").write_text(f"{SPEECH}\n{PODS}")
    settings = {"memory_bytes": "4MiB", "peer_token": f"{tmp_path}/peers-{{ordinal}}"}
    with LocalCluster(2, tmp_path, settings) as cluster, ThreadPoolExecutor(1) as pool:
        home = cluster.pod_urls[1]
        rank = PodConnection(home, JobSpec("job", packed[0], policy="redox", memory_bytes=600_000), 0, home, 60)
        batch = pool.submit(rank.batch, 0, np.arange(64))
        until(lambda: metric(home, "refill_refused_requests_total", status="503") > 0 or batch.done(), "a refusal")
        (tmp_path / "peers-0").write_text(SPEECH)
        assert len(batch.result(30).payloads) == 64


@pytest.mark.variant  # pods look at their certificates every five seconds
def test_the_authority_of_pods_is_replaced_by_way_of_both(packed: Packed, tmp_path: Path) -> None:
    """Certificates of both are then good together. A live policy needs both pods."""
    old, new = trustme.CA(), trustme.CA()
    pods = [tmp_path / "0", tmp_path / "1"]

    def trusts(pod: Path, *authorities: trustme.CA) -> None:
        (pod / "ca.pem").write_bytes(b"".join(each.cert_pem.bytes() for each in authorities))

    for pod in pods:
        pod.mkdir()
        write_certificate(old, pod)
        trusts(pod, old)
    files = {"peer_tls_cert": "cert.pem", "peer_tls_key": "key.pem", "peer_tls_ca": "ca.pem"}
    settings = {name: f"{tmp_path}/{{ordinal}}/{file}" for name, file in files.items()}
    with LocalCluster(2, tmp_path, {"memory_bytes": "4MiB", "wait_seconds": 1} | settings) as cluster:
        home = cluster.pod_urls[0]
        rank = PodConnection(home, JobSpec("job", packed[0], policy="redox", memory_bytes=600_000), 0, home, 5)

        def restarts(number: int) -> int:
            return cluster.log(number).count("starts anew")

        def all_restarted(numbers: list[int], before: list[int]) -> bool:
            return all(restarts(number) > before[number] for number in numbers)

        received = rank.batch(0, np.arange(20)).sample_ids.tolist()
        steps: list[tuple[list[int], Callable[[Path], None]]] = [
            ([0, 1], lambda pod: trusts(pod, old, new)),
            ([0], lambda pod: write_certificate(new, pod)),
            ([1], lambda pod: write_certificate(new, pod)),
            ([0, 1], lambda pod: trusts(pod, new)),
        ]
        for numbers, step in steps:
            before = [restarts(number) for number in range(2)]
            for number in numbers:
                step(pods[number])
            until(partial(all_restarted, numbers, before), "the pods' word of it")
            received += rank.batch(0, np.arange(len(received), len(received) + 20)).sample_ids.tolist()
        assert len(set(received)) == len(received) == 100


def test_no_secret_is_in_what_pods_say(secured: Secured, job: dict[str, Any]) -> None:
    """After all the tests above, which got many answers and errors."""
    secured.rank("vision", job).batch(0, np.arange(20))
    said = "".join(secured.cluster.log(pod) for pod in range(3))
    said += secured.get("/metrics", "vision").text + secured.get("/v1/jobs", "vision").text
    said += repr(secured.credentials("vision"))
    for secret in (VISION, SPEECH, PODS, "PRIVATE KEY"):
        assert secret not in said


def test_metrics_have_a_port_of_their_own(packed: Packed, tmp_path: Path) -> None:
    unused_port = free_port()
    (tmp_path / "tokens").write_text(VISION)
    settings = {"client_tokens": str(tmp_path / "tokens"), "metrics_port": unused_port, "memory_bytes": "4MiB"}
    with LocalCluster(1, tmp_path, settings) as cluster:
        own = f"http://127.0.0.1:{unused_port}"
        for path in ("/metrics", "/healthz", "/readyz"):
            assert httpx.get(own + path).status_code == 200
        assert "refill_memory_budget_bytes" in httpx.get(f"{own}/metrics").text
        assert httpx.get(f"{own}/v1/jobs").status_code == 404
        assert httpx.get(f"{cluster.pod_urls[0]}/metrics").status_code == 401


def test_datasets_that_jobs_may_name(packed: Packed, tmp_path: Path) -> None:
    settings = {"dataset_urls": f"s3://other/data,{packed[0]}", "memory_bytes": "4MiB"}
    with LocalCluster(1, tmp_path, settings) as cluster:
        url = cluster.pod_urls[0]
        kind = kind_of(JobSpec("mine", packed[0]))
        kind(url, JobSpec("mine", packed[0], memory_bytes=600_000), 0, None, 0).info()
        for wrong in ("file:///etc", f"{packed[0]}-2", f"{packed[0]}/../secret", "s3://other/database"):
            with pytest.raises(NotAllowed, match="does not serve"):
                kind(url, JobSpec("other", wrong), 0, None, 0).info()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"CLIENT_TOKENS": "nowhere"}, "tokens can't be read from"),
        ({"CLIENT_TOKENS": "empty"}, "holds no token"),
        ({"CLIENT_TOKENS": "short"}, "need 16 letters"),
        ({"PEER_TOKEN": "nowhere"}, "can't be read"),
        ({"TLS_CERT": "empty", "TLS_KEY": "empty"}, "no certificate with its key"),
        ({"TLS_CERT": "empty"}, "tls_cert and tls_key need each other"),
        ({"PEER_TLS_CERT": "empty", "PEER_TLS_KEY": "empty"}, "need each other"),
    ],
)
def test_files_that_can_not_be_used_are_named_at_the_start(tmp_path: Path, files: dict[str, str], said: str) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "short").write_text("secret")
    environment = {f"REFILL_{name}": str(tmp_path / file) for name, file in files.items()}
    assert said in refill_says("serve", "--port=1", "--peer-port=2", environment=environment)


def test_a_token_file_of_a_client_that_can_not_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name in ("nowhere", "empty"):
        with pytest.raises(InvalidInput, match="token file"):
            Credentials(str(tmp_path / name))
    with pytest.raises(InvalidInput, match="certificates"):
        Credentials(ca_file=str(tmp_path / "empty"))


def ports_of(cluster: LocalCluster) -> list[int]:
    return [int(url.rsplit(":", 1)[1]) for url in cluster.pod_urls]
