"""What ``helm test`` runs passes on pods that work, and says in one line what is wrong with others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.conftest import free_port
from tests.helm.rendering import release

from refill_service.demo.local_cluster import LocalCluster


def check(url: str, num_pods: int, dataset: str) -> subprocess.CompletedProcess[str]:
    """The test pod's command, with these in place of its own arguments."""
    (container,) = release({"dataset": {"url": "s3://bucket/images"}}).the("Pod")["spec"]["containers"]
    assert container["command"] == ["python", "-c"]
    script, *arguments = container["args"]
    assert arguments == ["http://refill.ml.svc:8000", "3", "s3://bucket/images"]
    command = [sys.executable, "-I", "-c", script, url, str(num_pods), dataset]
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


def test_pods_of_another_number_fail(three_pods: LocalCluster) -> None:
    assert_fails(check(three_pods.pod_urls[0], 5, ""), "a pod knows of 3 pods, and there are to be 5")


@pytest.mark.parametrize("dataset", ["", "s3://bucket/images"])
def test_a_service_that_does_not_answer_fails(dataset: str) -> None:
    assert_fails(check(f"http://127.0.0.1:{free_port()}", 3, dataset), "Connection refused")


def assert_fails(result: subprocess.CompletedProcess[str], why: str) -> None:
    assert result.returncode == 1
    assert result.stderr.startswith("wrong: ")
    assert result.stderr.count("\n") == 1
    assert why in result.stderr
