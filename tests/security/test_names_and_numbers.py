"""What does a pod do with names and numbers that nobody would use? Refuse or sum up; it neither fails nor grows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.forked_processes import run_refill

from refill_service.demo.local_cluster import LocalCluster
from refill_service.serving.client_protocol import HEADERS_BYTES

Packed = tuple[str, dict[str, bytes]]
TEAM, PODS = "vision-0123456789abcdef", "pods-0123456789abcdef"
SHOWN = {"authorization": f"Bearer {TEAM}"}
NUM_RANKS = 1100
LONG = "x" * 128


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory, packed: Packed) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("pod")
    (folder / "team").write_text(TEAM)
    (folder / "pods").write_text(PODS)
    settings: dict[str, Any] = {
        "memory_bytes": "4MiB",
        "pinned_fraction": 0,
        "client_tokens": folder / "team",
        "peer_token": folder / "pods",
        "dataset_urls": packed[0],
    }
    with LocalCluster(1, folder, settings) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "name", [f"{LONG}x", "x" * 251, "x" * 4096, "x" * 60_000, "%00", "%ff", "..", "a%2fb", "%f0%9f%98%80" * 64]
)
def test_no_name_is_an_error_of_the_pod(pod: LocalCluster, name: str) -> None:
    for method in ("GET", "PUT", "DELETE"):
        for what in ("", "/epochs/0/receipt", "/batch", "/planned", "/planned/batch", "/planned/received"):
            with hung_up_on_while_it_writes(name):
                answer = httpx.request(method, f"{pod.pod_urls[0]}/v1/jobs/{name}{what}", headers=SHOWN, json={})
                assert 400 <= answer.status_code < 500, (method, what, answer.text)
                assert answer.json()["error"]
    for method, what in (("GET", ""), ("DELETE", ""), ("GET", "/planned"), ("DELETE", "/planned?plan=x")):
        with (
            httpx.Client(http1=False, http2=True, headers={"authorization": f"Bearer {PODS}"}) as peer,
            hung_up_on_while_it_writes(name),
        ):
            found = peer.request(method, f"http://127.0.0.1:{pod.peer_ports[0]}/peer/v1/jobs/{name}{what}")
            assert found.status_code < 500, found.text
    assert httpx.get(f"{pod.pod_urls[0]}/healthz").status_code == 200


@contextlib.contextmanager
def hung_up_on_while_it_writes(name: str) -> Iterator[None]:
    """Who sends more than may be asked for may be refused, and hung up on, before all of it is written."""
    try:
        yield
    except httpx.WriteError:
        assert len(name) > HEADERS_BYTES


def test_the_longest_name_is_a_jobs(pod: LocalCluster, packed: Packed) -> None:
    url, body = f"{pod.pod_urls[0]}/v1/jobs/{LONG}", {"dataset": packed[0], "memory_bytes": 600_000}
    assert httpx.put(url, headers=SHOWN, json=body, timeout=30).status_code == 200
    assert httpx.get(url, headers=SHOWN).status_code == 200
    assert httpx.delete(url, headers=SHOWN).status_code == 200


@pytest.mark.slow_attack
def test_ranks_have_a_bounded_number_of_series(pod: LocalCluster, packed: Packed, tmp_path: Path) -> None:
    """A job may say that it has very many ranks. What they fetched is still all there, and ``refill top`` shows it."""
    url = f"{pod.pod_urls[0]}/v1/jobs/crowded"
    body = {"dataset": packed[0], "memory_bytes": 2_000_000, "world_size": 20 * NUM_RANKS}
    assert httpx.put(url, headers=SHOWN, json=body, timeout=30).status_code == 200
    with httpx.Client(headers=SHOWN) as client:
        for rank in range(NUM_RANKS):
            seen = {"rank": 20 * rank, "data_wait_seconds": 1.0, "samples": 3, "bytes": 100}
            assert client.post(f"{url}/report", json=seen).status_code == 204
        metrics = client.get(f"{pod.pod_urls[0]}/metrics").text
    series = [
        sample
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "refill_client_samples_total"
    ]
    assert len(series) == 1025
    assert sum(sample.value for sample in series) == 3 * NUM_RANKS
    assert sum(sample.value for sample in series if sample.labels["rank"] == "other") == 3 * (NUM_RANKS - 1024)
    (tmp_path / "shown").write_text(TEAM)
    top = ["top", pod.pod_urls[0], "--once", "--token-file", str(tmp_path / "shown")]
    run = run_refill(top)
    assert run.returncode == 0, run.stderr
    assert "crowded" in run.stdout
