"""The example that adds pods: its query says when training waits, and its lines run `helm upgrade`, up to a bound."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.dashboards.debian_tools import succeeds, tool
from tests.helm.pod_security import violations
from tests.helm.rendering import CHART, release

EXAMPLE = {
    document["kind"]: document
    for document in yaml.safe_load_all((CHART.parent / "examples" / "scale.yaml").read_text())
}
RULES = CHART.parents[1] / "dashboards" / "rules.yaml"
SPEC: dict[str, Any] = EXAMPLE["ScaledJob"]["spec"]
(CONTAINER,) = SPEC["jobTargetRef"]["template"]["spec"]["containers"]


@pytest.mark.parametrize("version", ["1.25", "1.37"])
def test_kubernetes_takes_it(version: str) -> None:
    """The ScaledJob itself is KEDA's; what it makes is a Job."""
    for kind in ("ServiceAccount", "RoleBinding"):
        kubernetes_validate.validate(EXAMPLE[kind], version, strict=True)
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "scale"}, "spec": SPEC["jobTargetRef"]}
    kubernetes_validate.validate(job, version, strict=True)
    assert violations({"metadata": {}, "spec": SPEC["jobTargetRef"]["template"]["spec"]}) == []


@pytest.mark.parametrize(("waited", "wanted"), [(30, 1), (6, 0)], ids=["half of the time", "a tenth"])
def test_the_query_says_whether_training_waits(waited: int, wanted: int, tmp_path: Path) -> None:
    """``waited``: seconds of each minute, by the rank that waits most. Those of another release wait longer."""
    (trigger,) = SPEC["triggers"]
    assert trigger["metadata"]["threshold"] == "1"
    shutil.copy(RULES, tmp_path)
    series = 'refill_client_data_wait_seconds_total{job="%s", training_job="run-1", rank="%d"}'
    waits = {("ml/refill", 0): waited, ("ml/refill", 1): waited / 3, ("ml/other", 0): 50}
    case = {
        "interval": "1m",
        "input_series": [{"series": series % rank, "values": f"0+{each}x120"} for rank, each in waits.items()],
        "promql_expr_test": [
            {
                "expr": trigger["metadata"]["query"],
                "eval_time": "2h",
                "exp_samples": [{"labels": "{}", "value": wanted}],
            }
        ],
    }
    (tmp_path / "case.yaml").write_text(yaml.safe_dump({"rule_files": [RULES.name], "tests": [case]}))
    succeeds(tool("promtool"), "test", "rules", str(tmp_path / "case.yaml"))


def test_the_query_asks_for_the_release_that_is_scaled() -> None:
    """By the label that both monitors of the chart give it."""
    (trigger,) = SPEC["triggers"]
    found = release({"serviceMonitor": {"enabled": True}}, namespace="ml")
    (endpoint,) = found.the("ServiceMonitor")["spec"]["endpoints"]
    labels = {each["targetLabel"]: each.get("replacement") for each in endpoint["relabelings"]}
    assert re.findall(r'\bjob="([^"]*)"', trigger["metadata"]["query"]) == [labels["job"]]


@pytest.mark.parametrize(("pods", "upgraded"), [("3", True), ("6", False), ("9", False)])
def test_a_step_adds_a_pod_up_to_the_bound(pods: str, upgraded: bool, tmp_path: Path) -> None:
    """With a kubectl that knows ``pods`` of them, and a helm that says what it was asked."""
    for name, said in (("kubectl", pods), ("helm", '"$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {said}\n")
        (tmp_path / name).chmod(0o755)
    given = {each["name"]: each["value"] for each in CONTAINER["env"]}
    environment = given | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run(CONTAINER["command"], env=environment, capture_output=True, text=True, check=True).stdout
    assert said.startswith("upgrade refill oci://") is upgraded, said
    if upgraded:
        assert " --reset-then-reuse-values --set replicas=4 --wait " in said
        assert release().the("StatefulSet")["metadata"]["name"] == "refill", "that of which kubectl is asked"
