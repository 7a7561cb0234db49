"""Names of jobs that come in URLs, and that pods put into URLs of their own: no team speaks for another by them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from refill.pods.credentials import Credentials
from refill.pods.planned_connection import PlannedConnection
from refill.protocol.job_spec import JobSpec
from refill_service.demo.local_cluster import LocalCluster

Packed = tuple[str, dict[str, bytes]]
TOKENS = {team: f"{team}-0123456789abcdef" for team in ("speech", "vision")}


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("teams")
    (folder / "tokens").mkdir()
    for team, token in TOKENS.items():
        (folder / "tokens" / team).write_text(token)
    (folder / "peer").write_text("0123456789abcdef-of-pods")
    settings: dict[str, str | int | float] = {
        "client_tokens": str(folder / "tokens"),
        "peer_token": str(folder / "peer"),
        "memory_bytes": "32MiB",
    }
    with LocalCluster(2, folder, settings) as cluster:
        yield cluster


@pytest.fixture
def victim(pods: LocalCluster, packed: Packed, tmp_path: Path) -> PlannedConnection:
    (tmp_path / "token").write_text(TOKENS["vision"])
    spec = JobSpec("victim", packed[0], chunk_size=16, memory_bytes=4 << 20)
    rank = PlannedConnection(pods.pod_urls[0], spec, 0, None, 30, Credentials(token_file=str(tmp_path / "token")))
    rank.batch(0, np.arange(40))
    return rank


ENDS = ["victim%3Fholder%3Dvision%26z%3D", "victim%3fholder=vision%23", "victim%3Fholder%3Dvision%23", "victim%2523"]
READS = [
    "victim%252Fplanned%252Fepochs%252F0%3Fholder%3Dvision%26packed%3Dtrue%23/epochs/0/receipt",
    "victim%252Fplanned%252Fepochs%252F0%3Fholder%3Dvision%23/epochs/0",
    "victim%3Fholder%3Dvision%23",
    "victim%2Fplanned%3Fholder%3Dvision%23",
]


def test_no_name_of_a_job_ends_another_teams_or_reads_of_it(pods: LocalCluster, victim: PlannedConnection) -> None:
    other = {"authorization": f"Bearer {TOKENS['speech']}"}
    asked = [("DELETE", path) for path in [*ENDS, "victim"]] + [("GET", path) for path in [*READS, "victim"]]
    for url in pods.pod_urls:
        for method, path in asked:
            answer = httpx.request(method, f"{url}/v1/jobs/{path}", headers=other)
            assert 400 <= answer.status_code < 500, f"{method} {path}: {answer.text}"
            assert victim.plan_id not in answer.text
    own = {"authorization": f"Bearer {TOKENS['vision']}"}
    for url in pods.pod_urls:
        assert httpx.get(f"{url}/v1/jobs/victim", headers=own).json()["plan_id"] == victim.plan_id
    victim.batch(0, np.arange(40, 80))
