"""Values that operators know from other charts do here what they do there: each is looked for where it belongs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from tests.helm.rendering import CHART, Release, merged, release, release_as_given, values_in

EVERYTHING = values_in(CHART / "ci" / "everything-values.yaml")
RULES = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())


@pytest.fixture(scope="module")
def all_set() -> Release:
    return release_as_given(EVERYTHING, kubernetes="v1.34.1")


@pytest.fixture(scope="module")
def by_default() -> Release:
    return release({"serviceMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}})


def test_pods_get_what_was_asked_for_and_their_test_runs_where_they_do(all_set: Release, by_default: Release) -> None:
    spec, test = all_set.pod_template["spec"], all_set.the("Pod")["spec"]
    assert all_set.container["envFrom"] == EVERYTHING["extraEnvFrom"]
    assert spec["initContainers"] == EVERYTHING["initContainers"]
    assert [each["name"] for each in spec["containers"]] == ["refill", "socket-proxy"]
    for name in ("schedulerName", "runtimeClassName", "dnsPolicy", "dnsConfig", "hostAliases", "tolerations"):
        assert spec[name] == test[name] == EVERYTHING[name], name
        assert name not in by_default.pod_template["spec"]
    assert spec["imagePullSecrets"] == test["imagePullSecrets"] == [{"name": "my-registry"}, {"name": "of-the-mirror"}]


def test_the_stateful_set_updates_as_was_asked_for(all_set: Release, by_default: Release) -> None:
    stateful, usual = all_set.the("StatefulSet"), by_default.the("StatefulSet")
    spec = stateful["spec"]
    assert spec["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"partition": 1}}
    assert (spec["minReadySeconds"], spec["revisionHistoryLimit"]) == (10, 3)
    assert stateful["metadata"]["annotations"] == {"owner": "ml-platform", "reloader.stakater.com/auto": "true"}
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["metadata"]["annotations"] == {"backup.example.com/skip": "yes"}
    assert usual["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
    assert not {"minReadySeconds", "revisionHistoryLimit"} & set(usual["spec"])
    assert "annotations" not in usual["metadata"]


def test_every_object_has_the_common_labels_and_annotations_and_selectors_have_none(all_set: Release) -> None:
    given = {id(each) for each in all_set.objects if each["metadata"]["name"].endswith(("-proxies", "-as-text"))}
    assert len(given) == 2, "extraObjects stay as they are"
    for made in [*all_set.objects, {"kind": "pods", **all_set.pod_template}]:
        if id(made) not in given:
            assert made["metadata"]["labels"]["cost-center"] == "4711", made["kind"]
            assert made["metadata"]["annotations"]["owner"] == "ml-platform", made["kind"]
    fixed = all_set.the("StatefulSet")["spec"]
    for selector in (fixed["selector"]["matchLabels"], fixed["volumeClaimTemplates"][0]["metadata"]["labels"]):
        assert "cost-center" not in selector, "a label that is added later would be refused there"


def test_labels_of_the_chart_are_nobody_elses() -> None:
    found = release({"commonLabels": {"app.kubernetes.io/name": "mine"}, "service": {"labels": {"helm.sh/chart": "x"}}})
    for made in (found.the("StatefulSet"), found.service("clients"), found.pod_template):
        assert made["metadata"]["labels"]["app.kubernetes.io/name"] == "refill"
    assert found.service("clients")["metadata"]["labels"]["helm.sh/chart"].startswith("refill-")


def test_a_component_of_the_users_is_not_that_of_an_object_of_the_chart() -> None:
    """Pods are chosen by it, and Services by a ServiceMonitor."""
    found = release({"commonLabels": {"app.kubernetes.io/component": "ml"}})
    made = [found.the("StatefulSet"), *found.of_kind("Service"), *found.pods]
    components = [each["metadata"]["labels"]["app.kubernetes.io/component"] for each in made]
    assert components == ["cache", "clients", "peers", "cache", "test"]


def test_the_service_is_what_was_asked_for(all_set: Release, by_default: Release) -> None:
    given, clients, peers = EVERYTHING["service"], all_set.service("clients"), all_set.service("peers")
    fields = ("loadBalancerClass", "loadBalancerSourceRanges", "externalTrafficPolicy", "ipFamilyPolicy", "ipFamilies")
    assert {name: clients["spec"][name] for name in fields} == {name: given[name] for name in fields}
    assert clients["metadata"]["labels"]["exposed"] == "internally"
    assert peers["spec"]["ipFamilies"] == ["IPv6", "IPv4"]
    assert not {*fields} & {*by_default.service("clients")["spec"], *by_default.service("peers")["spec"]}


@pytest.mark.parametrize(
    ("repository", "mirrored"),
    [
        ("refill", "mirror:5000/refill"),
        ("registry.example.com/ml/refill", "mirror:5000/ml/refill"),
        ("localhost/refill", "mirror:5000/refill"),
        ("ml/refill", "mirror:5000/ml/refill"),
    ],
)
def test_a_global_registry_takes_the_place_of_the_images_own(repository: str, mirrored: str) -> None:
    values = {"image": {"repository": repository}, "global": {"imageRegistry": "mirror:5000/", "others": {"a": 1}}}
    found = release(values)
    images = {pod["spec"]["containers"][0]["image"] for pod in found.pods}
    assert images == {f"{mirrored}:{yaml.safe_load((CHART / 'Chart.yaml').read_text())['appVersion']}"}


def test_extra_objects_are_templates(all_set: Release) -> None:
    names = {each["metadata"]["name"] for each in all_set.of_kind("ConfigMap")}
    assert {"refill-proxies", "training-cache-as-text"} <= names


@pytest.mark.parametrize(
    ("kind", "endpoints"), [("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")]
)
def test_monitors_scrape_as_was_asked_for(kind: str, endpoints: str) -> None:
    given = EVERYTHING["serviceMonitor"]
    of_kind = f"{kind[0].lower()}{kind[1:]}"
    found = release({of_kind: given}).the(kind)
    (endpoint,) = found["spec"][endpoints]
    for name in ("interval", "scrapeTimeout", "honorLabels", "metricRelabelings"):
        assert endpoint[name] == given[name]
    assert endpoint["relabelings"][-1] == given["relabelings"][0]
    assert [each["targetLabel"] for each in endpoint["relabelings"]] == ["job", "instance", "node"]
    assert found["metadata"]["namespace"] == "monitoring"
    assert found["spec"]["namespaceSelector"] == {"matchNames": ["ml"]}, "the pods are where they were"
    assert "namespaceSelector" not in release({of_kind: {"enabled": True}}).the(kind)["spec"]


def test_what_monitoring_reads_goes_where_it_looks(all_set: Release, by_default: Release) -> None:
    boards = [
        each for each in all_set.of_kind("ConfigMap") if "grafana_dashboard" in each["metadata"].get("labels", {})
    ]
    assert len(boards) == 3
    for made in [*boards, all_set.the("PrometheusRule")]:
        assert made["metadata"]["namespace"] == "monitoring"
    assert by_default.the("PrometheusRule")["metadata"]["namespace"] == "ml"


def alerts(found: Release) -> dict[str, dict[str, Any]]:
    groups = found.the("PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_single_alerts_are_changed_dropped_and_added(all_set: Release, by_default: Release) -> None:
    usual, changed = alerts(by_default), alerts(all_set)
    for rule in changed.values():
        rule["expr"] = rule["expr"].replace('job="ml/training-cache"', 'job="ml/refill"')
    assert set(usual) - set(changed) == {"RefillWasteUp"}
    assert set(changed) - set(usual) == {"StoreIsSlow"}
    errors = changed["RefillStoreErrors"]
    assert errors["expr"] == usual["RefillStoreErrors"]["expr"].replace("> 0.01", "> 0.05")
    assert (errors["for"], errors["labels"]) == ("10m", {"severity": "critical", "namespace": "ml"})
    for name in set(usual) & set(changed) - {"RefillStoreErrors"}:
        assert usual[name]["expr"] == changed[name]["expr"], name


def test_every_alert_has_a_threshold_that_can_be_changed() -> None:
    """It is the number that its expression ends with."""
    of_rules = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
    values = {each["alert"]: {"threshold": 41.5} for each in of_rules}
    changed = alerts(release({"prometheusRule": {"enabled": True, "alerts": values}}))
    for rule in of_rules:
        assert re.search(r"[<>] [0-9.]+\s*$", rule["expr"]), rule["alert"]
        assert changed[rule["alert"]]["expr"].split()[-1] == "41.5"


def test_probes_leave_a_pod_time_to_start_and_a_pod_that_hangs_none(by_default: Release) -> None:
    """A question that fails is a warning among a pod's events."""
    container = by_default.container
    assert container["startupProbe"]["initialDelaySeconds"] >= 2
    assert container["startupProbe"]["timeoutSeconds"] >= 10, "a pod listens long before it answers, on a busy node"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz?ending=ready"
    assert container["livenessProbe"]["terminationGracePeriodSeconds"] == 5
    spec = by_default.pod_template["spec"]
    assert container["livenessProbe"]["terminationGracePeriodSeconds"] < spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(("version", "has_classes"), [("v1.20.2", False), ("v1.24.9", True)])
def test_fields_that_came_later_are_left_out(version: str, has_classes: bool) -> None:
    found = release_as_given(merged(EVERYTHING, {"service": {"trafficDistribution": "none"}}), kubernetes=version)
    assert "minReadySeconds" not in found.the("StatefulSet")["spec"]
    assert "terminationGracePeriodSeconds" not in found.container["livenessProbe"]
    assert ("loadBalancerClass" in found.service("clients")["spec"]) is has_classes


def test_a_part_of_another_chart_takes_its_global_values(tmp_path: Path) -> None:
    """As bitnami's charts are used: the registry is said once for all parts."""
    outer = tmp_path / "platform"
    shutil.copytree(CHART, outer / "charts" / "refill")
    (outer / "Chart.yaml").write_text("apiVersion: v2\nname: platform\nversion: 1.0.0\n")
    values = {"global": {"imageRegistry": "mirror.example.com", "storageClass": "fast"}, "refill": {"insecure": True}}
    made = helm_python.Chart.load(outer).render(values, name="p", namespace="ml")
    (stateful,) = (text for text in made.values() if "kind: StatefulSet" in text)
    image = yaml.safe_load(stateful)["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image.startswith("mirror.example.com/refill:")
