"""What users copy works: the lines that are shown after installation, and the example of a training Job."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.conftest import free_port
from tests.helm.pod_security import violations
from tests.helm.rendering import CHART, release

from refill_service.datasets.pack import pack
from refill_service.demo.digits import write_digits
from refill_service.demo.local_cluster import LocalCluster

EXAMPLE = [document for document in yaml.safe_load_all((CHART.parent / "examples" / "train.yaml").read_text())]
SHOWN_URL = "http://refill.ml.svc:8000"


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = (document for document in EXAMPLE if document["kind"] == kind)
    return dict(found)


def python_lines(notes: str) -> str:
    """The indented block that begins with an import."""
    block = re.search(r"^(    import refill\n(?:    .*\n|\n)+)", notes, re.MULTILINE)
    assert block is not None
    return textwrap.dedent(block[1])


def test_the_url_shown_is_that_of_the_service() -> None:
    found = release({"service": {"port": 80}, "fullnameOverride": "cache"}, namespace="vision")
    service = found.service("clients")
    (port,) = service["spec"]["ports"]
    assert f"http://{service['metadata']['name']}.vision.svc:{port['port']}" in python_lines(found.notes)
    assert service["spec"]["selector"].items() <= found.pod_template["metadata"]["labels"].items()


def test_the_lines_shown_train(three_pods: LocalCluster, packed: tuple[str, dict[str, bytes]], tmp_path: Path) -> None:
    lines = python_lines(release({"dataset": {"url": packed[0]}}).notes)
    assert packed[0] in lines
    script = tmp_path / "train.py"
    for shown, here in (
        (SHOWN_URL, three_pods.pod_urls[0]),
        ("range(90)", "range(2)"),
        ("...", "print(len(batch['bin']))"),
    ):
        assert lines.count(shown) == 1
        lines = lines.replace(shown, here)
    script.write_text(lines + "\ndataset.end_job()\n")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert sum(map(int, result.stdout.split())) == 2 * 1000


def test_the_receipt_command_shown_names_a_pod_that_exists() -> None:
    found = release({"fullnameOverride": "cache", "ports": {"clients": 9000}})
    assert "kubectl exec -n ml cache-0 -- refill receipt run-1 0 --url http://localhost:9000" in found.notes


@pytest.mark.parametrize("version", ["1.27", "1.31", "1.37"])
def test_kubernetes_takes_the_example(version: str) -> None:
    for document in EXAMPLE:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_example_passes_the_restricted_standard_and_finds_its_parts() -> None:
    template = of_kind("Job")["spec"]["template"]
    assert violations(template) == []
    assert of_kind("Service")["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["subdomain"] == of_kind("Service")["metadata"]["name"]
    environment = variables(template)
    assert environment["CACHE"] == f"http://{release().service('clients')['metadata']['name']}:8000"
    assert environment["MASTER_ADDR"] == f"{of_kind('Job')['metadata']['name']}-0.{template['spec']['subdomain']}"
    assert environment["WORLD_SIZE"] == str(of_kind("Job")["spec"]["completions"])


def variables(template: dict[str, Any]) -> dict[str, str]:
    (container,) = template["spec"]["containers"]
    return {variable["name"]: variable.get("value", "") for variable in container["env"]}


def test_the_example_trains_on_two_ranks(three_pods: LocalCluster, tmp_path: Path) -> None:
    """As the Job's two pods: every sample reaches one of them."""
    dataset = (tmp_path / "packed").as_uri()
    asyncio.run(pack(str(write_digits(tmp_path / "files")[0]), dataset))
    script = tmp_path / "train.py"
    script.write_text(of_kind("ConfigMap")["data"]["train.py"])
    given = {"CACHE": three_pods.pod_urls[0], "DATASET": dataset, "EPOCHS": "2"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = os.environ | variables(of_kind("Job")["spec"]["template"]) | given
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    lines = "".join(out for out, _ in told)
    counts = re.findall(r"rank (\d) epoch (\d): (\d+) samples", lines)
    assert sorted(counts) == [(rank, epoch, "750") for rank in "01" for epoch in "01"]
