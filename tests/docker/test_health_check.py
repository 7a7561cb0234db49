"""The image's HEALTHCHECK, asked about real pods."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trustme
from tests.conftest import free_port

from refill_service.demo.local_cluster import LocalCluster

HEALTH_CHECK = Path(__file__).parents[2] / "docker" / "health_check.py"


def health_check(**settings: object) -> subprocess.CompletedProcess[str]:
    environment = {f"REFILL_{name.upper()}": str(value) for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, str(HEALTH_CHECK)],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, **environment},
    )


def test_a_pod_that_answers_is_healthy(three_pods: LocalCluster) -> None:
    port = three_pods.pod_urls[0].rpartition(":")[2]
    done = health_check(port=port)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pod_with_a_certificate_is_asked_by_https(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("refill-0.refill.svc", "127.0.0.1")
    files = {name: tmp_path / name for name in ("tls_cert", "tls_key", "ca")}
    certificate.cert_chain_pems[0].write_to_path(files["tls_cert"])
    certificate.private_key_pem.write_to_path(files["tls_key"])
    authority.cert_pem.write_to_path(files["ca"])
    served = {name: str(files[name]) for name in ("tls_cert", "tls_key")}
    environment = {"REFILL_CA_FILE": str(files["ca"])}
    with LocalCluster(1, tmp_path, {"memory_bytes": "4MiB", **served}, environment) as cluster:
        port = cluster.pod_urls[0].rpartition(":")[2]
        assert health_check(port=port, **served).returncode == 0
        assert health_check(port=port).returncode == 1, "plain HTTP"


@pytest.mark.parametrize("port", ["free", "eight thousand"])
def test_no_answer_is_one_line(port: str) -> None:
    done = health_check(port=free_port() if port == "free" else port)
    assert done.returncode == 1
    assert done.stderr.startswith("no answer: ")
    assert done.stderr.count("\n") == 1
