"""The container's limit is what a pod promises to stay under: memory_bytes + 15 % + 200 MB."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.end_to_end.doc_pages import ROOT, spans
from tests.helm.rendering import VALUES_FILES, release, release_as_given, values_in

from refill.protocol.sizes import parse_bytes
from refill_service.settings import load_settings

MI = 2**20


def limit_bytes(memory: str | int, extra: str | int = 0, sending: str | int = 0) -> int:
    values = {"memory": memory, "extraMemory": extra, "settings": {"sending_bytes": sending}}
    resources = release(values).container["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"], "memory is not lent to others"
    assert resources["limits"]["memory"].endswith("Mi")
    return int(resources["limits"]["memory"].removesuffix("Mi")) * MI


@pytest.mark.parametrize("memory", ["1Mi", "256Mi", "1500M", "4Gi", "1.5Gi", "64G", "2Ti", 4294967296, 123456789])
@pytest.mark.parametrize("extra", [0, "1Gi", "500M"])
def test_the_limit_is_the_promise_rounded_up_to_mebibytes(memory: str | int, extra: str | int) -> None:
    promised = parse_bytes(memory) * 1.15 + 200_000_000 + parse_bytes(extra)
    assert promised <= limit_bytes(memory, extra) < promised + MI


@pytest.mark.parametrize("memory", ["512Mi", "1500M", "1.5Gi", "2Ti", 4294967296, 123456789])
def test_the_pod_is_told_the_memory_that_was_asked_for(memory: str | int) -> None:
    assert release({"memory": memory}).environment["REFILL_MEMORY_BYTES"] == str(parse_bytes(memory))


def test_the_pinned_tier_leaves_the_file_system_a_tenth_of_its_disk() -> None:
    environment = release({"pinnedDisk": {"enabled": True, "size": "100Gi"}}).environment
    assert int(environment["REFILL_PINNED_DIR_BYTES"]) == 90 * 2**30


@pytest.mark.parametrize(
    ("values", "asked"),
    [
        ({}, None),
        ({"pinnedDisk": {"enabled": True}}, "100Gi"),
        ({"pinnedDisk": {"enabled": True, "size": 429496729600}}, "429496729600"),
        ({"pinnedDisk": {"enabled": True, "persistent": True}}, None),
        ({"pinnedDisk": {"enabled": True}, "resources": {"requests": {"ephemeral-storage": "9Gi"}}}, "9Gi"),
        ({"resources": {"requests": {"ephemeral-storage": "9Gi"}}}, "9Gi"),
        ({"pinnedDisk": {"enabled": True}, "resources": {"limits": {"ephemeral-storage": "9Gi"}}}, None),
    ],
)
def test_a_pinned_tier_on_the_disk_of_the_node_asks_for_it(values: dict[str, Any], asked: str | None) -> None:
    """Else a pod is put on a node without the room, where the kubelet then evicts others for it."""
    found = release(values)
    resources = found.container["resources"]
    assert resources["requests"].get("ephemeral-storage") == asked
    assert resources["requests"]["cpu"] == "1"
    given = values.get("resources", {}).get("limits", {})
    assert {key: value for key, value in resources["limits"].items() if key != "memory"} == given
    kubernetes_validate.validate(found.the("StatefulSet"), "1.37", strict=True)


def test_the_docs_grow_the_volume_to_the_size_that_the_pod_is_then_told() -> None:
    text = (ROOT / "docs" / "INSTALL.md").read_text()
    ((claim, storage),) = re.findall(r'kubectl patch pvc (\S+) .*"storage":"(\w+)"', text)
    (size,) = re.findall(r"--set pinnedDisk.size=(\w+)", text)
    stateful = release({"pinnedDisk": {"enabled": True, "persistent": True, "size": size}}).the("StatefulSet")
    (template,) = stateful["spec"]["volumeClaimTemplates"]
    assert claim == f"{template['metadata']['name']}-{stateful['metadata']['name']}-0"
    assert storage == template["spec"]["resources"]["requests"]["storage"]


WITH_OTHERS = {
    "insecure": True,
    "initContainers": [{"name": "a", "image": "a", "resources": {"limits": {"memory": "32Mi"}}}],
    "sidecars": [{"name": "b", "image": "b", "resources": {"limits": {"memory": "64Mi"}}}],
}


@pytest.mark.parametrize(
    "values", [*map(values_in, VALUES_FILES), WITH_OTHERS], ids=[*(path.name for path in VALUES_FILES), "with others"]
)
def test_the_limit_that_the_runbook_sets_again_is_the_charts(values: dict[str, Any], tmp_path: Path) -> None:
    """Its commands, by a Helm that shows the manifest of a release, and a kubectl that shows what it is asked."""
    found = spans(ROOT / "docs" / "RUNBOOK.md")
    (read,) = (span for span in found if span.startswith("SIZE="))
    (limit,) = (span for span in found if span.startswith("kubectl set resources statefulset"))
    rendered = release_as_given(values)
    kept = [each for each in rendered.objects if "helm.sh/hook" not in each["metadata"].get("annotations", {})]
    (tmp_path / "manifest").write_text(yaml.safe_dump_all(kept))
    shell = f'helm() {{ cat {tmp_path}/manifest; }}; kubectl() {{ echo "$@"; }}; {read}; {limit}'
    asked = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout.split()
    memory = rendered.container["resources"]["limits"]["memory"]
    assert asked[-2:] == [f"--limits=memory={memory}", f"--requests=memory={memory}"]
    assert f"--containers={rendered.container['name']}" in asked


def test_pods_know_what_they_may_take_beyond_their_promise() -> None:
    """Else an alert fires where this is used."""
    given = release({"memory": "4Gi", "extraMemory": "750M"})
    assert given.environment["REFILL_EXTRA_MEMORY_BYTES"] == "750000000"
    settings = load_settings(memory_bytes="4Gi", extra_memory_bytes=750_000_000)
    assert 0 <= limit_bytes("4Gi", "750M") - settings.promised_bytes < MI


@pytest.mark.parametrize(("sending", "more"), [("2Gi", 2 * 2**30 - 4 * 2**30 // 10), ("100Mi", 0), (0, 0)])
def test_answers_that_may_take_more_than_usual_have_their_memory(sending: str | int, more: int) -> None:
    """Else the pod that is told so is ended by the kernel when its clients read slowly."""
    assert abs(limit_bytes("4Gi", sending=sending) - limit_bytes("4Gi") - more) < MI
    settings = load_settings(memory_bytes="4Gi", sending_bytes=sending)
    assert 0 <= limit_bytes("4Gi", sending=sending) - settings.promised_bytes < MI
