"""What Helm makes of the chart is what Kubernetes takes, and its objects find each other."""

from __future__ import annotations

import contextlib
import copy
import re
import ssl
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import helm_python
import kubernetes_validate
import pytest
import trustme
import yaml
from tests.helm.mounted_secrets import certificate_names, certificate_objects
from tests.helm.pod_security import violations
from tests.helm.rendering import CHART, VALUES_FILES, Release, release, values_in

KUBERNETES = ["1.25", "1.27", "1.31", "1.34", "1.37"]
"""Versions with a schema here; what an older cluster takes is tried in tests/cluster."""

everywhere = pytest.mark.parametrize("path", VALUES_FILES, ids=lambda path: path.stem)


@pytest.mark.parametrize("version", KUBERNETES)
@everywhere
def test_kubernetes_takes_every_object(path: Path, version: str) -> None:
    values = values_in(path)
    values["service"] = {**values.get("service", {}), "trafficDistribution": "auto"}
    for found in release(values, kubernetes=f"v{version}.1").objects:
        if not found["apiVersion"].startswith("monitoring.coreos.com/"):
            kubernetes_validate.validate(found, version, strict=True)


@everywhere
def test_helm_lint_finds_nothing(path: Path) -> None:
    report = helm_python.lint(CHART, values_in(path), strict=True)
    assert report["errors"] == []
    assert report["messages"] == []


@everywhere
def test_pods_pass_the_restricted_standard(path: Path) -> None:
    for pod in release(values_in(path)).pods:
        assert violations(pod) == []


@pytest.mark.parametrize(
    ("where", "broken", "control"),
    [
        ("pod", {"hostNetwork": True}, "Host Namespaces"),
        ("pod", {"volumes": [{"name": "node", "hostPath": {"path": "/"}}]}, "Volume Types"),
        ("pod", {"securityContext": {}}, "Running as Non-root"),
        ("pod", {"securityContext": {"runAsNonRoot": True}}, "Seccomp"),
        ("pod", {"securityContext": {"runAsUser": 0}}, "Running as Non-root user"),
        ("container", {"securityContext": {}}, "Privilege Escalation"),
        ("container", {"securityContext": {"privileged": True}}, "Privileged Containers"),
        ("container", {"securityContext": {"capabilities": {"drop": ["ALL"], "add": ["NET_RAW"]}}}, "Capabilities"),
        ("container", {"ports": [{"containerPort": 1, "hostPort": 1}]}, "Host Ports"),
    ],
)
def test_the_check_of_the_restricted_standard_finds_what_breaks_it(
    where: str, broken: dict[str, Any], control: str
) -> None:
    pod = copy.deepcopy(next(iter(release().pods)))
    (pod["spec"] if where == "pod" else pod["spec"]["containers"][0]).update(broken)
    assert control in {violation.split(":")[0] for violation in violations(pod)}


@everywhere
def test_the_root_file_system_is_read_only_and_tmp_is_not(path: Path) -> None:
    found = release(values_in(path))
    assert found.container["securityContext"]["readOnlyRootFilesystem"] is True
    assert "/tmp" in {mount["mountPath"] for mount in found.container["volumeMounts"]}


@everywhere
def test_services_find_the_pods_and_nothing_else(path: Path) -> None:
    found = release(values_in(path))
    labels, test_labels = found.pod_template["metadata"]["labels"], found.the("Pod")["metadata"]["labels"]
    for selector in selectors(found):
        assert selector.items() <= labels.items()
        assert not selector.items() <= test_labels.items()


def selectors(found: Release) -> list[dict[str, str]]:
    """Of everything that picks cache pods."""
    whole = found.the("StatefulSet")["spec"]["selector"]["matchLabels"]
    services = [service["spec"]["selector"] for service in found.of_kind("Service")]
    others = [budget["spec"]["selector"]["matchLabels"] for budget in found.of_kind("PodDisruptionBudget")]
    policies = [policy["spec"]["podSelector"]["matchLabels"] for policy in found.of_kind("NetworkPolicy")]
    return [whole, *services, *others, *policies]


@everywhere
def test_services_and_probes_name_ports_that_the_container_has(path: Path) -> None:
    found = release(values_in(path))
    ports = {port["name"]: port["containerPort"] for port in found.container["ports"]}
    assert ports["clients"] == int(found.environment["REFILL_PORT"])
    assert ports["peers"] == int(found.environment["REFILL_PEER_PORT"])
    assert ports["metrics"] == int(found.environment["REFILL_METRICS_PORT"])
    for service in found.of_kind("Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert found.container[probe]["httpGet"]["port"] == "metrics"
    for policy in found.of_kind("NetworkPolicy"):
        assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == set(ports)


@everywhere
def test_volumes_and_mounts_agree(path: Path) -> None:
    found = release(values_in(path))
    claims = found.the("StatefulSet")["spec"].get("volumeClaimTemplates", [])
    volumes = [volume["name"] for volume in found.pod_template["spec"]["volumes"]]
    volumes += [claim["metadata"]["name"] for claim in claims]
    assert Counter(volumes) == Counter(mount["name"] for mount in found.container["volumeMounts"])


def test_pods_are_reached_by_the_names_that_the_peers_service_gives() -> None:
    found = release(values_in(CHART / "ci" / "everything-values.yaml"), namespace="vision")
    stateful, peers = found.the("StatefulSet"), found.service("peers")
    assert stateful["spec"]["serviceName"] == peers["metadata"]["name"]
    assert peers["spec"]["clusterIP"] == "None"
    assert peers["spec"]["publishNotReadyAddresses"] is True
    host = f"{stateful['metadata']['name']}-{{ordinal}}.{peers['metadata']['name']}.vision.svc"
    assert found.environment["REFILL_POD_URLS"] == f"https://{host}:9000"
    assert found.environment["REFILL_PEER_URLS"] == f"https://{host}:9001"
    assert found.environment["REFILL_REPLICAS"] == str(stateful["spec"]["replicas"])


def test_only_pods_of_the_release_reach_the_peers_port() -> None:
    found = release({"networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"team": "vision"}}}]}})
    rules = {rule["ports"][0]["port"]: rule.get("from") for rule in found.the("NetworkPolicy")["spec"]["ingress"]}
    pods = {"podSelector": {"matchLabels": found.the("StatefulSet")["spec"]["selector"]["matchLabels"]}}
    assert rules["peers"] == [pods]
    assert pods in rules["clients"], "pods that resume jobs talk to each other as clients do"
    test_pod = found.the("Pod")["metadata"]["labels"]
    allowed = [peer["podSelector"]["matchLabels"] for peer in rules["clients"] if "podSelector" in peer]
    assert any(labels.items() <= test_pod.items() for labels in allowed), "`helm test` is let in"


def test_everybody_reaches_the_ports_of_clients_and_metrics_unless_said_otherwise() -> None:
    rules = release().the("NetworkPolicy")["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in rules if "from" not in rule] == ["clients", "metrics"]


def test_who_reads_metrics_and_who_trains_are_named_apart() -> None:
    prometheus, vision = ({"namespaceSelector": {"matchLabels": {"team": team}}} for team in ("monitoring", "vision"))
    found = release({"networkPolicy": {"clients": [vision], "metrics": [prometheus]}})
    rules = {rule["ports"][0]["port"]: rule["from"] for rule in found.the("NetworkPolicy")["spec"]["ingress"]}
    assert rules["metrics"] == [prometheus]
    assert vision in rules["clients"]
    assert prometheus not in rules["clients"]


@pytest.mark.parametrize("tls", [{}, {"secret": "a"}, {"peerSecret": "b"}, {"secret": "a", "peerSecret": "b"}])
def test_services_and_urls_say_what_the_ports_speak(tls: dict[str, str]) -> None:
    found = release({"tls": tls})
    of_clients = "https" if "secret" in tls else "http"
    assert found.environment["REFILL_POD_URLS"].startswith(f"{of_clients}://")
    assert found.environment["REFILL_PEER_URLS"].startswith("https://" if "peerSecret" in tls else "http://")
    assert found.service("clients")["spec"]["ports"][0]["appProtocol"] == of_clients
    assert {port["name"]: port["appProtocol"] for port in found.service("peers")["spec"]["ports"]} == {
        "clients": of_clients,
        "peers": "https" if "peerSecret" in tls else "kubernetes.io/h2c",
        "metrics": "http",
    }


def test_no_quota_of_cpu_or_memory_refuses_the_test_pod() -> None:
    """One for limits refuses every container without them."""
    resources = release().the("Pod")["spec"]["containers"][0]["resources"]
    assert set(resources["requests"]) == set(resources["limits"]) == {"cpu", "memory"}


def test_the_test_pod_gets_no_private_key() -> None:
    """What else it gets is tried in test_release_check.py."""
    spec = release({"tls": {"secret": "certificate", "peerSecret": "of-pods"}}).the("Pod")["spec"]
    (volume,) = spec["volumes"]
    assert volume["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    assert volume["secret"]["optional"], "an authority that everybody trusts has none"


def test_the_certificate_that_is_shown_is_for_all_names_of_the_release() -> None:
    """By OpenSSL's own rules, in a handshake without a network."""
    names = certificate_names()
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert(*names).configure_cert(server)
    authority.configure_trust(client)
    found = release({"tls": {"secret": "a", "peerSecret": "b"}})
    urls = [found.environment[name].replace("{ordinal}", "12") for name in ("REFILL_POD_URLS", "REFILL_PEER_URLS")]
    urls.append(found.the("Pod")["spec"]["containers"][0]["args"][1])
    for url in urls:
        shake_hands(server, client, str(urlsplit(url).hostname))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, client, "refill-0.other-peers.ml.svc")


def test_the_authority_of_pods_that_is_shown_signs_their_certificate_and_nothing_else() -> None:
    """From an issuer to the Secret that the values name, in the namespace of the release."""
    shown = certificate_objects()
    assert {(each["apiVersion"], each["metadata"]["namespace"]) for each in shown} == {("cert-manager.io/v1", "ml")}
    issuers = {each["metadata"]["name"]: each["spec"] for each in shown if each["kind"] == "Issuer"}
    certificates = {each["spec"]["secretName"]: each["spec"] for each in shown if each["kind"] == "Certificate"}
    of_pods = certificates["refill-peer-tls"]
    (signed,) = (each for each in certificates.values() if each["issuerRef"] == of_pods["issuerRef"])
    assert signed is of_pods
    assert of_pods["issuerRef"]["kind"] == "Issuer"
    authority = certificates[issuers[of_pods["issuerRef"]["name"]]["ca"]["secretName"]]
    assert authority["isCA"] is True
    assert authority["commonName"], "else some of those who check it take it for nobody's"
    assert issuers[authority["issuerRef"]["name"]] == {"selfSigned": {}}
    assert int(authority["duration"].removesuffix("h")) > 24 * 365, "one that is renewed is a step for all pods"


def test_values_shown_that_break_the_standards_say_so() -> None:
    text = (CHART.parents[1] / "docs" / "INSTALL.md").read_text()
    blocks = [block for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
    broken = [
        block
        for block in blocks
        if "apiVersion" not in block and any(violations(pod) for pod in release(yaml.safe_load(block)).pods)
    ]
    assert broken, "a release on training nodes has a hostPath"
    assert all("Pod Security" in block for block in broken)


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server, server_hostname=host), server.wrap_bio(to_server, to_client, True)]
    for _ in range(4):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    assert ends[0].getpeercert()


def test_service_links_would_break_the_pods_and_are_off() -> None:
    """For a service named ``refill``, Kubernetes sets REFILL_PORT=tcp://10.0.0.1:8000 in every pod beside it."""
    assert [pod["spec"]["enableServiceLinks"] for pod in release().pods] == [False, False]


def test_kubernetes_waits_longer_for_a_pod_to_end_than_the_pod_takes() -> None:
    for grace_seconds in (25, 59.5, 300):
        spec = release({"settings": {"grace_seconds": grace_seconds}}).pod_template["spec"]
        assert spec["terminationGracePeriodSeconds"] >= grace_seconds + 5


def test_the_pod_of_helm_test_takes_nobodys_place() -> None:
    found = release({"priorityClassName": "training"})
    assert found.pod_template["spec"]["priorityClassName"] == "training"
    assert "priorityClassName" not in found.the("Pod")["spec"]


def test_the_docs_have_the_seconds_of_the_pods_beginning_and_end() -> None:
    spec, docs = release().pod_template["spec"], CHART.parents[1] / "docs"
    says = f"`terminationGracePeriodSeconds` to `grace_seconds` + 5, which is {spec['terminationGracePeriodSeconds']}."
    assert says in (docs / "POD.md").read_text()
    probe = spec["containers"][0]["readinessProbe"]
    between, answers = probe["periodSeconds"], probe["successThreshold"]
    says = rf"at least {(answers - 1) * between} s later, .*: `readinessProbe` wants three answers in turn, {between} s"
    assert answers == 3
    assert re.search(says, (docs / "INSTALL.md").read_text())


LONG = "a-release-with-the-longest-name-that-helm-allows-xxx"  # and one letter more, below


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (LONG + "1", {}),
        ("refill", {"fullnameOverride": "f" * 200}),
        ("refill", {"nameOverride": "n" * 200}),
        ("x", {"dashboards": {"enabled": True}}),
    ],
)
def test_names_are_never_too_long(name: str, values: dict[str, Any]) -> None:
    found = release(values, name=name)
    for made in found.objects:
        assert len(made["metadata"]["name"]) <= 63
        for labels in (made["metadata"]["labels"], found.pod_template["metadata"]["labels"]):
            assert max(map(len, labels.values())) <= 63
    stateful = found.the("StatefulSet")
    assert len(f"{stateful['metadata']['name']}-0123456789") <= 63, "the label controller-revision-hash"
    assert len(f"{stateful['metadata']['name']}-9999") <= 63, "the host name of the last pod"


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("refill", "refill-2"), (LONG + "1", LONG + "2")])
def test_two_releases_in_one_namespace_do_not_meet(one: str, other: str) -> None:
    first, second = release(name=one), release(name=other)
    names = [{(made["kind"], made["metadata"]["name"]) for made in found.objects} for found in (first, second)]
    assert names[0].isdisjoint(names[1])
    for selector in selectors(first):
        assert not selector.items() <= second.pod_template["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("version", "asked", "chosen"),
    [
        ("v1.27.3", "auto", None),
        ("v1.30.0", "PreferClose", None),
        ("v1.31.5-eks-abc", "auto", "PreferClose"),
        ("v1.31.5-eks-abc", "PreferSameZone", None),
        ("v1.31.5-eks-abc", "PreferClose", "PreferClose"),
        ("v1.34.0-gke.1", "auto", "PreferSameNode"),
        ("v1.34.0-gke.1", "PreferSameZone", "PreferSameZone"),
        ("v1.34.0-gke.1", "none", None),
    ],
)
def test_a_near_pod_is_preferred_in_the_words_that_the_cluster_knows(
    version: str, asked: str, chosen: str | None
) -> None:
    found = release({"service": {"trafficDistribution": asked}}, kubernetes=version)
    assert found.service("clients")["spec"].get("trafficDistribution") == chosen


@pytest.mark.parametrize(
    ("version", "api", "later"),
    [("v1.20.2", "policy/v1beta1", False), ("v1.26.9", "policy/v1", False), ("v1.27.3-gke.100", "policy/v1", True)],
)
def test_what_a_cluster_does_not_know_yet_is_left_out(version: str, api: str, later: bool) -> None:
    found = release({"pinnedDisk": {"enabled": True, "persistent": True}}, kubernetes=version)
    budget = found.the("PodDisruptionBudget")
    assert budget["apiVersion"] == api
    assert ("unhealthyPodEvictionPolicy" in budget["spec"]) is later
    assert ("persistentVolumeClaimRetentionPolicy" in found.the("StatefulSet")["spec"]) is later


@everywhere
def test_ports_say_their_protocol(path: Path) -> None:
    """It is part of a port's key: server-side apply, as Helm 4 does it, does not know the default everywhere."""
    found = release(values_in(path))
    ports = [port for service in found.of_kind("Service") for port in service["spec"]["ports"]]
    assert {port["protocol"] for port in [*ports, *found.container["ports"]]} == {"TCP"}


def test_pods_keep_apart_as_far_as_asked() -> None:
    def affinity(values: dict[str, Any]) -> dict[str, Any]:
        return dict(release(values).pod_template["spec"].get("affinity", {}))

    assert list(affinity({})["podAntiAffinity"]) == ["preferredDuringSchedulingIgnoredDuringExecution"]
    (required,) = affinity({"podAntiAffinity": "required"})["podAntiAffinity"].items()
    assert required[0] == "requiredDuringSchedulingIgnoredDuringExecution"
    assert required[1][0]["topologyKey"] == "kubernetes.io/hostname"
    assert affinity({"podAntiAffinity": "none"}) == {}
    own = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    assert affinity({"affinity": own}) == own


def test_a_spread_without_a_selector_counts_the_pods_of_the_release() -> None:
    own = {"matchLabels": {"app": "mine"}}
    given = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    found = release({"topologySpreadConstraints": [given, given | {"labelSelector": own}]})
    selectors_of_spread = [
        constraint["labelSelector"] for constraint in found.pod_template["spec"]["topologySpreadConstraints"]
    ]
    assert selectors_of_spread == [found.the("StatefulSet")["spec"]["selector"], own]


def test_labels_of_the_user_do_not_take_pods_away_from_their_services() -> None:
    found = release({"podLabels": {"app.kubernetes.io/component": "mine", "team": "vision"}})
    labels = found.pod_template["metadata"]["labels"]
    assert labels["team"] == "vision"
    assert labels.items() >= found.service("clients")["spec"]["selector"].items()
