"""Values that can't be meant are refused in a line that names them; all others are explained."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
import yaml
from tests.helm.rendering import CHART, VALUES_FILES, merged, release, release_as_given, values_in

from refill_service.settings import Settings

TEXT = (CHART / "values.yaml").read_text()
VALUES = yaml.safe_load(TEXT)
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"memroy": "4Gi"}, "additional properties 'memroy' not allowed"),
        ({"memory": "4GiB"}, "at '/memory': '4GiB' does not match pattern"),
        ({"memory": "lots"}, "at '/memory': 'lots' does not match pattern"),
        ({"memory": -1}, "at '/memory'"),
        ({"memory": "1k"}, "memory: 1k is less than 1Mi; write for example 4Gi"),
        ({"replicas": 0}, "at '/replicas': minimum: got 0, want 1"),
        ({"replicas": "three"}, "at '/replicas': got string, want integer"),
        ({"settings": {"memory_bytes": "4Gi"}}, "at '/settings': additional properties 'memory_bytes' not allowed"),
        ({"settings": {"log_level": "loud"}}, "at '/settings/log_level'"),
        ({"store": {"endpoint": "http://x"}}, "at '/store': additional properties 'endpoint' not allowed"),
        ({"store": {"endpoint_url": "minio:9000"}}, "at '/store/endpoint_url': 'minio:9000' does not match pattern"),
        ({"dataset": {"url": "ftp://bucket/x"}}, "at '/dataset/url': 'ftp://bucket/x' does not match pattern"),
        ({"image": {"digest": "latest"}}, "at '/image/digest': 'latest' does not match pattern"),
        ({"service": {"trafficDistribution": "near"}}, "at '/service/trafficDistribution'"),
        ({"podAntiAffinity": "yes"}, "at '/podAntiAffinity'"),
        ({"ports": {"clients": 70000}}, "at '/ports/clients': maximum: got 70,000, want 65,535"),
        ({"ports": {"clients": 9000, "peers": 9000}}, "ports.clients and ports.peers are both 9000"),
        ({"ports": {"metrics": 8000}}, "ports.clients and ports.metrics are both 8000"),
        ({"access": {"clientTokens": "Tokens!"}}, "at '/access/clientTokens': 'Tokens!' does not match pattern"),
        ({"tls": {"cert": "x"}}, "at '/tls': additional properties 'cert' not allowed"),
        ({"settings": {"dataset_urls": "s3://a,s3://b"}}, "at '/settings/dataset_urls': got string, want array"),
        ({"settings": {"dataset_urls": ["s3://a,s3://b"]}}, "at '/settings/dataset_urls/0'"),
        (
            {"settings": {"dataset_urls": ["s3://bucket/img"]}, "dataset": {"url": "s3://bucket/images"}},
            "dataset.url, s3://bucket/images, begins with none of settings.dataset_urls",
        ),
        ({"dataset": {"url": "file:///data/images"}}, "pods read only folders that are listed there"),
        ({"dataset": {"url": "https://host/images"}}, "and web servers likewise"),
        ({"store": {"azure_account": "evil.example.com/"}}, "at '/store/azure_account'"),
        ({"credentials": {"variables": {"LD_PRELOAD": "x"}}}, "invalid propertyName 'LD_PRELOAD'"),
        ({"prometheusRule": {"runbookUrl": "docs/RUNBOOK.md"}}, "at '/prometheusRule/runbookUrl'"),
        (
            {"settings": {"drain_seconds": 30}},
            "settings.drain_seconds, 30, leaves no time of settings.grace_seconds, 25",
        ),
        (
            {"settings": {"remote_memory_fraction": 0.8, "in_flight_fraction": 0.2}},
            "settings.remote_memory_fraction and in_flight_fraction leave no memory for chunks",
        ),
        ({"settings": {"pinned_fraction": 1}}, "at '/settings/pinned_fraction': maximum: got 1, want 0.9"),
        ({"settings": {"unix_socket": "refill.sock"}}, "at '/settings/unix_socket'"),
        (
            {"extraEnv": [{"name": "REFILL_MEMORY_BYTES", "value": "64Gi"}]},
            "extraEnv: REFILL_MEMORY_BYTES follows from other values; see settings and store",
        ),
        (
            {"resources": {"limits": {"memory": "1Gi"}}},
            "resources.limits.memory: it follows from memory and extraMemory; set those",
        ),
        (
            {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}},
            "serviceMonitor.enabled and podMonitor.enabled: every pod would be counted twice; choose one",
        ),
        ({"podDisruptionBudget": {"maxUnavailable": 0}}, "at '/podDisruptionBudget/maxUnavailable'"),
        ({"podDisruptionBudget": {"maxUnavailable": "0%"}}, "at '/podDisruptionBudget/maxUnavailable'"),
        ({"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}, "extraVolumes: there is a volume tmp already"),
        (
            {"access": {"clientTokens": "a", "peerToken": "b"}, "extraVolumes": [{"name": "peer-token"}]},
            "extraVolumes: there is a volume peer-token already",
        ),
        (
            {"extraVolumeMounts": [{"name": "certs", "mountPath": "/certs"}]},
            "extraVolumeMounts: there is no volume certs among extraVolumes",
        ),
        (
            {"extraVolumes": [{"name": "big"}], "extraVolumeMounts": [{"name": "big", "mountPath": "/tmp/"}]},
            "extraVolumeMounts: the chart mounts /tmp itself",
        ),
        ({"sidecars": [{"name": "refill"}]}, "sidecars: the container of the chart is called refill"),
        ({"initContainers": [{"image": "curl"}]}, "at '/initContainers/0': missing property 'name'"),
        (
            {"volumeRetention": {"whenDeleted": "Delete"}, "pinnedDisk": {"enabled": True}},
            "volumeRetention: there are no volumes; it goes with pinnedDisk.enabled and pinnedDisk.persistent",
        ),
        (
            {"pinnedDisk": {"persistent": True}},
            "pinnedDisk.persistent: there is no disk; it goes with pinnedDisk.enabled",
        ),
        ({"service": {"loadBalancerClass": "x"}}, "service.loadBalancerClass needs service.type=LoadBalancer"),
        ({"service": {"externalTrafficPolicy": "Local"}}, "service.externalTrafficPolicy needs service.type="),
        (
            {"prometheusRule": {"enabled": True, "alerts": {"RefillSlow": {"enabled": False}}}},
            "prometheusRule.alerts: there is no alert RefillSlow; there are RefillDataStarvation, ",
        ),
        ({"fullnameOverride": "Cache"}, "at '/fullnameOverride': 'Cache' does not match pattern"),
        ({"fullnameOverride": "cache-"}, "at '/fullnameOverride'"),
        ({"fullnameOverride": "a.b"}, "at '/fullnameOverride'"),
        ({"fullnameOverride": "2024-run"}, "at '/fullnameOverride'"),
        ({"nameOverride": "cache-"}, "at '/nameOverride'"),
        ({"serviceAccount": {"name": "Reader"}}, "at '/serviceAccount/name'"),
        ({"credentials": {"existingSecret": "store_keys"}}, "at '/credentials/existingSecret'"),
        ({"serviceMonitor": {"namespace": "Monitoring"}}, "at '/serviceMonitor/namespace'"),
        ({"resources": {"requests": {"cpu": "lots"}}}, "at '/resources/requests/cpu': 'lots' does not match pattern"),
        ({"resources": {"requests": {"cpu": -1}}}, "at '/resources/requests/cpu': minimum: got -1, want 0"),
        ({"resources": {"requests": {"cpu": "-1"}}}, "at '/resources/requests/cpu'"),
        (
            {"resources": {"limits": {"cpu": "500m"}}},
            "resources.limits.cpu, 500m, is below resources.requests.cpu, 1",
        ),
        (
            {"resources": {"requests": {"ephemeral-storage": "2Gi"}, "limits": {"ephemeral-storage": "2G"}}},
            "resources.limits.ephemeral-storage, 2G, is below resources.requests.ephemeral-storage, 2Gi",
        ),
        (
            {"serviceMonitor": {"enabled": True, "interval": "1m", "scrapeTimeout": "61s"}},
            "serviceMonitor.scrapeTimeout, 61s, is longer than its interval, 1m",
        ),
        (
            {"podMonitor": {"enabled": True, "interval": "5s", "scrapeTimeout": "10000ms"}},
            "podMonitor.scrapeTimeout, 10000ms, is longer than its interval, 5s",
        ),
        ({"settings": {"unix_socket": "/run/refill/r.sock"}}, "no volume is mounted at /run/refill, where no other"),
        (
            {
                "settings": {"unix_socket": "/run/refill-2/r.sock"},
                "extraVolumes": [{"name": "socket"}],
                "extraVolumeMounts": [{"name": "socket", "mountPath": "/run/refill"}],
            },
            "settings.unix_socket: no volume is mounted at /run/refill-2",
        ),
        (
            {"service": {"ipFamilies": ["IPv6"]}},
            'settings.host, 0.0.0.0, is of IPv4 alone, and service.ipFamilies has IPv6: set settings.host to "::"',
        ),
        ({"service": {"ipFamilies": ["IPv4", "IPv6"]}, "settings": {"host": "10.0.0.1"}}, "settings.host, 10.0.0.1"),
        ({"pinnedDisk": {"enabled": True, "size": 0}}, "pinnedDisk.size: 0 holds no samples"),
        ({"pinnedDisk": {"enabled": True, "size": "0Gi"}}, "pinnedDisk.size: 0Gi holds no samples"),
        ({"prometheusRule": {"job": 'a" or up{job="b'}}, "at '/prometheusRule/job'"),
        ({"prometheusRule": {"alerts": {"RefillWasteUp": {"treshold": 1}}}}, "'treshold' not allowed"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_refusals_name_the_value(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        release(values)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["2024-run", "a.b", "2024"])
def test_a_release_whose_name_no_service_may_have_is_refused(name: str) -> None:
    """Else the API server refuses some of its objects, when others are there already."""
    with pytest.raises(helm_python.HelmError, match=f"a release called {name}: no Service can be called .* fullnameOv"):
        release(name=name)
    assert release({"fullnameOverride": "cache"}, name=name).of_kind("StatefulSet")


@pytest.mark.parametrize(
    "values",
    [
        {"resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": 0.5}}},
        {"resources": {"requests": {"cpu": "1500m"}, "limits": {"cpu": "2", "nvidia.com/gpu": 1}}},
        {"serviceMonitor": {"enabled": True, "interval": "1m", "scrapeTimeout": "60s"}},
        {"serviceMonitor": {"enabled": True, "scrapeTimeout": "60s"}},
        {"settings": {"unix_socket": "/tmp/refill.sock"}},
        {"settings": {"host": "::"}, "service": {"ipFamilies": ["IPv6"]}},
        {"service": {"ipFamilies": ["IPv4"]}},
        {
            "settings": {"unix_socket": "/run/refill/sockets/r.sock"},
            "extraVolumes": [{"name": "socket"}],
            "extraVolumeMounts": [{"name": "socket", "mountPath": "/run/refill/"}],
        },
    ],
    ids=json.dumps,
)
def test_what_is_just_within_bounds_is_taken(values: dict[str, Any]) -> None:
    assert release(values).of_kind("StatefulSet")


def paths(values: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from paths(value, (*above, name))


TAKEN_AWAY = (
    *("podSecurityContext", "securityContext", "startupProbe.", "livenessProbe.", "readinessProbe."),
    *("topologySpreadConstraints", "updateStrategy.type", "resources.requests.cpu", "dashboards.labels"),
    *("settings.unix_socket", "settings.dataset_urls"),
)
"""Null leaves these to Kubernetes, and the last ones to the pods."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(each, id=".".join(each), marks=[pytest.mark.variant] * (len(each) > 1)) for each in paths(VALUES)],
)
def test_null_is_what_is_usual_or_is_refused(path: tuple[str, ...]) -> None:
    """Helm takes a value away that is null, and its default."""
    values: Any = None
    for name in reversed(path):
        values = {name: values}
    usual: dict[str, Any] = {"access": {"clientTokens": "a", "peerToken": "b"}} if path[0] == "insecure" else {}
    usual |= {} if path[0] in ("insecure", "access") else {"insecure": True}
    if path[-1] != "enabled":
        usual |= {name: {"enabled": True} for name in ("serviceMonitor", "prometheusRule", "dashboards")}
    above = "".join(f"/{name}" for name in path[:-1])
    missing = f"at '{above}': missing property '{path[-1]}'"
    if (line := refusal(merged(usual, values))) is not None:
        assert missing in line or "access.clientTokens is empty" in line
    elif not ".".join(path).startswith(TAKEN_AWAY):
        assert release_as_given(merged(usual, values)).objects == release_as_given(usual).objects


def refusal(values: dict[str, Any]) -> str | None:
    try:
        release_as_given(values)
    except helm_python.HelmError as refused:
        return str(refused)
    return None


def test_unknown_values_are_refused_at_every_depth() -> None:
    def objects(schema: dict[str, Any], values: Any, path: str) -> None:
        for name, inner in schema.get("properties", {}).items():
            if "properties" in inner:
                objects(inner, values[name], f"{path}{name}.")
        # What other charts make of `global` is not ours to refuse.
        assert path == "global." or schema["additionalProperties"] is False, path

    objects(SCHEMA, VALUES, "")


def test_the_schema_has_the_values_that_there_are() -> None:
    def names(schema: dict[str, Any]) -> dict[str, Any]:
        return {name: names(inner) if "properties" in inner else None for name, inner in schema["properties"].items()}

    def same(known: dict[str, Any], values: dict[str, Any], path: str) -> None:
        optional = {"successThreshold", "initialDelaySeconds", "rollingUpdate"} if path else set()
        assert set(known) - optional <= set(values) <= set(known), path
        for name, inner in known.items():
            if inner and name in values:
                same(inner, values[name], f"{path}{name}.")

    same(names(SCHEMA), VALUES, "")


def test_the_schema_has_the_bounds_that_a_pod_has() -> None:
    """What is refused at installation is not refused by each pod, when it starts, over and over."""
    bounds = ("minimum", "exclusiveMinimum", "maximum")
    of_pod = Settings.model_json_schema()["properties"]
    for name, schema in SCHEMA["properties"]["settings"]["properties"].items():
        if "$ref" not in schema:
            given, wanted = ({key: of[key] for key in bounds if key in of} for of in (schema, of_pod[name]))
            assert given == wanted, name


def test_every_value_is_explained_above_it() -> None:
    lines = TEXT.splitlines()
    for number, line in enumerate(lines):
        if key := re.match(r"(\w+):", line):
            assert lines[number - 1].startswith("# "), f"{key[1]} has no comment"


def test_values_files_for_ci_turn_every_option_on() -> None:
    """So that what is checked of them is checked of the whole chart."""
    everything = values_in(CHART / "ci" / "everything-values.yaml")
    not_there = {"podMonitor", "podSecurityContext", "securityContext", "podAntiAffinity", "memory"}
    assert set(VALUES) - set(everything) <= not_there | {"imagePullSecrets"}
    assert len(VALUES_FILES) >= 5


def test_quantities_come_from_files_and_from_the_command_line_alike() -> None:
    for given in ("memory=4294967296", "memory=4Gi"):
        values = helm_python.parse_set_string(given)
        assert release(values).environment["REFILL_MEMORY_BYTES"] == "4294967296"


def test_values_shown_for_argo_cd_and_flux_are_values_of_this_chart() -> None:
    shown = re.findall(r"```yaml\n(.*?)```", (CHART.parents[1] / "docs" / "INSTALL.md").read_text(), re.DOTALL)
    found = {each["kind"]: each["spec"] for text in shown for each in yaml.safe_load_all(text) if "kind" in each}
    for values in (found["Application"]["source"]["helm"]["valuesObject"], found["HelmRelease"]["values"]):
        assert release_as_given(values).pod_template
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    assert found["Application"]["source"]["targetRevision"] == found["OCIRepository"]["ref"]["tag"] == version


def test_names_of_digits_stay_texts() -> None:
    """The API takes no number for a namespace, or for a label."""
    values = values_in(CHART / "ci" / "everything-values.yaml")
    for found in release(values, name="refill-1", namespace="2024").objects:
        assert isinstance(found["metadata"].get("namespace", "2024"), str), found["kind"]
    labels = release({"fullnameOverride": "cache"}, name="2024", namespace="7").the("StatefulSet")["metadata"]["labels"]
    assert labels["app.kubernetes.io/instance"] == "2024"
