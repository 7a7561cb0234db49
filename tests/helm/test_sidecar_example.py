"""The example of a cache beside the ranks: Kubernetes takes it, and its pods are one cache, asked over Unix sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from tests import forked_processes
from tests.conftest import free_port
from tests.helm.pod_security import violations
from tests.helm.rendering import CHART, release
from tests.helm.training_example import EXAMPLE as WITH_A_RELEASE
from tests.helm.training_example import variables
from tests.pod_fixtures import whole_epoch
from tests.waiting import until

from refill.pods.planned_connection import PlannedConnection
from refill.protocol.job_spec import JobSpec

EXAMPLE = {
    document["kind"]: document
    for document in yaml.safe_load_all((CHART.parent / "examples" / "train-sidecar.yaml").read_text())
}
TEMPLATE: dict[str, Any] = EXAMPLE["Job"]["spec"]["template"]
(SIDECAR,) = TEMPLATE["spec"]["initContainers"]
REPLICAS = EXAMPLE["Job"]["spec"]["completions"]


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_kubernetes_takes_it(version: str) -> None:
    for document in EXAMPLE.values():
        kubernetes_validate.validate(document, version, strict=True)
    assert violations(TEMPLATE) == []
    assert SIDECAR["restartPolicy"] == "Always", "it would have to end before the rank begins"


def test_it_is_the_run_of_the_other_example_but_for_the_cache() -> None:
    (other,) = (document for document in WITH_A_RELEASE if document["kind"] == "Job")
    mine, others = (variables(template) for template in (TEMPLATE, other["spec"]["template"]))
    assert mine | {"CACHE": others["CACHE"]} == others
    name, subdomain = EXAMPLE["Job"]["metadata"]["name"], TEMPLATE["spec"]["subdomain"]
    assert EXAMPLE["Service"]["metadata"]["name"] == subdomain
    given = {each["name"]: each.get("value") for each in SIDECAR["env"]}
    for ports, variable in (("clients", "REFILL_POD_URLS"), ("peers", "REFILL_PEER_URLS")):
        (port,) = (each["containerPort"] for each in SIDECAR["ports"] if each["name"] == ports)
        assert given[variable] == f"http://{name}-{{ordinal}}.{subdomain}:{port}"
    assert mine["CACHE"] == f"unix:{given['REFILL_UNIX_SOCKET']}"
    assert int(given["REFILL_REPLICAS"]) == REPLICAS


def test_its_memory_and_its_time_to_end_are_what_the_chart_would_give_it() -> None:
    (memory,) = (each["value"] for each in SIDECAR["env"] if each["name"] == "REFILL_MEMORY_BYTES")
    of_chart = release({"memory": memory})
    for kind in ("requests", "limits"):
        assert SIDECAR["resources"][kind]["memory"] == of_chart.container["resources"][kind]["memory"]
    seconds = "terminationGracePeriodSeconds"
    assert TEMPLATE["spec"][seconds] == of_chart.pod_template["spec"][seconds]


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[list[Path]]:
    """Of the sidecars, which run as the example says, with other ports and folders, and with less memory."""
    ports = [(free_port(), free_port(), free_port()) for _ in range(REPLICAS)]
    processes: list[forked_processes.ForkedProcess] = []
    try:
        for ordinal, (port, peer_port, metrics_port) in enumerate(ports):
            here = {
                "REFILL_HOST": "127.0.0.1",
                "REFILL_ORDINAL": str(ordinal),
                "REFILL_PORT": str(port),
                "REFILL_PEER_PORT": str(peer_port),
                "REFILL_METRICS_PORT": str(metrics_port),
                "REFILL_POD_URLS": ",".join(f"http://127.0.0.1:{each[0]}" for each in ports),
                "REFILL_PEER_URLS": ",".join(f"http://127.0.0.1:{each[1]}" for each in ports),
                "REFILL_UNIX_SOCKET": str(tmp_path / f"{ordinal}.sock"),
                "REFILL_MEMORY_BYTES": "4MiB",
                "REFILL_DATASET_URLS": "file:///",
                "REFILL_DRAIN_SECONDS": "0",
            }
            given = {each["name"]: each["value"] for each in SIDECAR["env"] if "value" in each}
            with (tmp_path / f"{ordinal}.log").open("ab") as log:
                processes.append(forked_processes.start_pod(SIDECAR["command"][1:], given | here, log))
        path = SIDECAR["startupProbe"]["httpGet"]["path"]
        for _, _, metrics_port in ports:
            until(lambda url=f"http://127.0.0.1:{metrics_port}{path}": _answers(url), "a sidecar that is ready")  # type: ignore[misc]
        yield [tmp_path / f"{ordinal}.sock" for ordinal in range(REPLICAS)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_sidecars_are_one_cache(sockets: list[Path], packed: tuple[str, dict[str, bytes]]) -> None:
    spec = JobSpec("run-1", packed[0], world_size=REPLICAS, chunk_size=16)
    delivered: list[int] = []
    for rank, path in enumerate(sockets):
        asking = PlannedConnection(f"unix:{path}", spec, rank, None, 30)
        delivered += [int(sample) for batch in whole_epoch(asking, 0) for sample in batch.sample_ids]
        assert asking.home == f"unix:{path}", "the pod beside it"
    assert sorted(delivered) == list(range(len(packed[1])))
