"""Does the demo for a cluster do what it says? Its objects are looked at, and its scripts run, without a cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from tests.cluster.cluster import CHART
from tests.cluster.demo import FIGURES, demo_objects, demo_values, figures_of
from tests.conftest import S3Server
from tests.forked_processes import run_refill
from tests.helm.pod_security import violations
from tests.helm.rendering import release_as_given

from refill_service.demo.local_cluster import LocalCluster

TEXT = (CHART.parent / "examples" / "demo.yaml").read_text()
OBJECTS = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(TEXT)}
PARTS = ("store", "pack", "train")


def test_kubernetes_takes_every_object_and_its_restricted_standard_every_pod() -> None:
    for made in OBJECTS.values():
        kubernetes_validate.validate(made, "1.34", strict=True)
        if "template" in made.get("spec", {}):
            template = made["spec"]["template"]
            assert violations({"metadata": template["metadata"], "spec": template["spec"]}) == []


def test_the_parts_are_the_whole_with_the_images_that_were_given() -> None:
    made = [each for part in PARTS for each in demo_objects(part, "here/refill:1", "here/s3:2", "http://r.ns.svc:8000")]
    assert len(made) == len(OBJECTS)
    pods = [each["spec"]["template"]["spec"] for each in made if "template" in each.get("spec", {})]
    assert {c["image"] for pod in pods for c in pod["containers"]} == {"here/refill:1", "here/s3:2"}
    (train,) = (each for each in made if each["kind"] == "Job" and each["metadata"]["name"] == "train-digits")
    variables = {each["name"]: each.get("value") for each in train["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert variables["CACHE"] == "http://r.ns.svc:8000"


def test_the_release_finds_the_store_and_the_dataset_that_were_made() -> None:
    environment = release_as_given(demo_values("registry.example.com:5000/refill:1.2")).environment
    service = OBJECTS["Service", "store"]["spec"]["ports"][0]
    assert environment["REFILL_STORE_ENDPOINT_URL"] == f"http://store:{service['port']}"
    assert "s3://demo/digits" in OBJECTS["ConfigMap", "pack"]["data"]["pack.py"]
    assert (
        demo_values("registry.example.com:5000/refill:1.2")["image"]["repository"] == "registry.example.com:5000/refill"
    )


def run_script(job: str, script: str, folder: Path, arguments: list[str], environment: dict[str, str]) -> str:
    """As the container runs it, with the variables that its Job gives and these in place of some."""
    spec = OBJECTS["Job", job]["spec"]["template"]["spec"]["containers"][0]
    given = {each["name"]: each["value"] for each in spec["env"] if "value" in each}
    (text,) = OBJECTS["ConfigMap", job]["data"].values()
    (folder / script).write_text(text)
    assert spec["command"][1].endswith(script)
    done = subprocess.run(
        [sys.executable, str(folder / script), *arguments],
        env=os.environ | given | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def packed_digits(s3_server: S3Server, tmp_path: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = s3_server.environment | {"SAMPLES": "1500", "PATH": path}
    run_script("pack", "pack.py", tmp_path, [str(tmp_path / "digits")], environment)
    return environment


def test_what_is_packed_is_learned_through_pods_and_every_epoch_is_exact(
    packed_digits: dict[str, str], s3_server: S3Server, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"memory_bytes": "4MiB", "pinned_fraction": 0}
    with LocalCluster(2, tmp_path, settings, s3_server.environment) as cluster:
        printed = run_script("train-digits", "train.py", tmp_path, [], {"CACHE": cluster.pod_urls[0]})
        epochs = re.findall(r"^epoch \d: (\d+) samples, ([\d.]+)% right", printed, re.MULTILINE)
        assert [seen for seen, _ in epochs] == 3 * ["1500"]
        assert float(epochs[-1][1]) > 90, printed
        for epoch in range(3):
            done = run_refill(["receipt", "digits-1", str(epoch), "--url", cluster.pod_urls[0]], dict(os.environ))
            assert done.returncode == 0, done.stdout + done.stderr
        texts = [httpx.get(f"{url}/metrics").text for url in cluster.pod_urls]
    lines = figures_of(texts)
    assert len(lines) == len(FIGURES)
    delivered = int(lines[0].split()[-2].replace(",", ""))
    assert delivered >= 3 * 1500 * 64 * 4, "what is shown is what was sent"


def test_the_figures_are_of_metrics_that_dashboards_show() -> None:
    boards = "".join(path.read_text() for path in (CHART.parents[1] / "dashboards").glob("*.json"))
    rules = (CHART / "files" / "rules.yaml").read_text()
    assert [name for name in FIGURES if name not in boards + rules] == []
