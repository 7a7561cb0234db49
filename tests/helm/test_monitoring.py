"""Dashboards, rules and monitors: the chart carries those of the repository, and Grafana and Prometheus find them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import pytest
import yaml
from tests.dashboards.debian_tools import succeeds, tool
from tests.helm.rendering import CHART, Release, release

SOURCE = CHART.parents[1] / "dashboards"
CARRIED = {path.name: path for path in (CHART / "files" / "dashboards").glob("*.json")}
RULES = CHART / "files" / "rules.yaml"
RULES_IN_CHART = yaml.safe_load(RULES.read_text())["groups"]
SCHEMAS = json.loads(Path(__file__).with_name("monitoring_schemas.json").read_text())
"""Of the custom resources, by kind; see its key "from"."""


def test_the_chart_carries_the_dashboards_of_the_repository() -> None:
    """Helm packs nothing from outside of a chart, so they are copied: `make chart-files`."""
    made = {path.name: path.read_text() for path in SOURCE.glob("*.json")}
    assert {name: path.read_text() for name, path in CARRIED.items()} == made


def test_the_chart_carries_the_rules_of_the_repository() -> None:
    made = SOURCE / "rules.yaml"
    assert RULES.exists() == made.exists()
    assert not made.exists() or RULES.read_text() == made.read_text()


@pytest.fixture
def chart_with(tmp_path: Path) -> Any:
    """The chart with these files in place of the ones that it carries."""

    def make(files: dict[str, str]) -> helm_python.Chart:
        copied = shutil.copytree(CHART, tmp_path / "refill")
        shutil.rmtree(copied / "files" / "dashboards", ignore_errors=True)
        (copied / "files" / "rules.yaml").unlink(missing_ok=True)
        for name, content in files.items():
            (copied / "files" / name).parent.mkdir(exist_ok=True)
            (copied / "files" / name).write_text(content)
        return helm_python.Chart.load(copied)

    return make


def rendered(chart: helm_python.Chart, values: dict[str, Any]) -> Release:
    return Release(chart.render({"insecure": True} | values, name="cache", namespace="ml"))


def test_each_dashboard_becomes_a_config_map_for_the_sidecar(chart_with: Any) -> None:
    boards = {
        "Training_View.json": {"uid": "refill-training", "title": "Training", "legend": "{{job}} of {{ rank }} <"},
        "refill-cost.json": {"uid": "refill-cost", "title": "Cost"},
    }
    chart = chart_with({f"dashboards/{name}": json.dumps(board, indent=2) for name, board in boards.items()})
    options = {"dashboards": {"enabled": True, "annotations": {"grafana_folder": "Training"}}}
    maps = rendered(chart, options).of_kind("ConfigMap")
    by_name = {
        "cache-refill-training-view": boards["Training_View.json"],
        "cache-refill-cost": boards["refill-cost.json"],
    }
    assert {found["metadata"]["name"] for found in maps} == set(by_name)
    for found in maps:
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert found["metadata"]["annotations"] == {"grafana_folder": "Training"}
        ((name, content),) = found["data"].items()
        assert name == f"ml.{found['metadata']['name']}.json"
        given, board = by_name[found["metadata"]["name"]], json.loads(content)
        assert board.pop("uid").startswith(given["uid"])
        assert board.pop("title") == f"{given['title']} (ml/cache-refill)"
        assert board.items() <= given.items(), "legends are Grafana's to fill in"
    assert not rendered(chart, {}).of_kind("ConfigMap")


SHARED = {"enabled": True, "namespace": "monitoring"}
BESIDE_EACH_OTHER = [("refill", "ml"), ("refill", "speech"), ("other", "ml"), ("refill", "b-ml"), ("ml-refill", "b")]


def test_releases_of_any_namespaces_may_all_bring_their_dashboards() -> None:
    """The sidecar writes all files into one folder; of two with one uid or title, Grafana saves none of the folder."""
    boards = [
        (name, json.loads(text))
        for release_name, namespace in BESIDE_EACH_OTHER
        for each in release({"dashboards": SHARED}, release_name, namespace).of_kind("ConfigMap")
        for name, text in each["data"].items()
    ]
    assert len(boards) == 3 * len(BESIDE_EACH_OTHER)
    for known in ([name for name, _ in boards], *([board[key] for _, board in boards] for key in ("uid", "title"))):
        assert len(set(known)) == len(boards), known
    assert max(len(board["uid"]) for _, board in boards) <= 40, "Grafana's bound"
    assert all({"refill"} == set(board["tags"]) for _, board in boards), "links between dashboards are by tag"


def test_a_dashboard_begins_with_the_cache_of_its_release_where_that_is_known() -> None:
    def chosen(values: dict[str, Any]) -> list[Any]:
        boards = [json.loads(*found["data"].values()) for found in release(values).of_kind("ConfigMap")]
        variables = [each for board in boards for each in board["templating"]["list"] if each["name"] == "cache"]
        assert len(variables) == 3
        return [each["current"]["value"] for each in variables]

    values = {"dashboards": SHARED}
    assert chosen(values) == ["$__all"] * 3
    assert chosen(values | {"podMonitor": SHARED}) == [["ml/refill"]] * 3


def test_objects_of_several_namespaces_meet_in_that_of_prometheus() -> None:
    values = {"dashboards": SHARED, "prometheusRule": SHARED}
    for monitor in ("serviceMonitor", "podMonitor"):
        names = [
            (made["kind"], made["metadata"]["name"])
            for release_name, namespace in [*BESIDE_EACH_OTHER, ("refill" * 8, "n" * 63), ("refill" * 8, "n" * 62)]
            for made in release(values | {monitor: SHARED}, release_name, namespace).objects
            if made["metadata"]["namespace"] == "monitoring"
        ]
        assert len(set(names)) == len(names) == 5 * (len(BESIDE_EACH_OTHER) + 2)
        for _, name in names:
            assert len(name) <= 63
            assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", name), name


def test_rules_are_given_to_the_operator_as_they_are(chart_with: Any) -> None:
    rule = {"alert": "PodDown", "expr": "up == 0", "for": "5m", "annotations": {"summary": "{{ $labels.pod }} is down"}}
    rules = {"groups": [{"name": "refill", "rules": [rule]}]}
    chart = chart_with({"rules.yaml": yaml.safe_dump(rules)})
    found = rendered(chart, {"prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}})
    assert found.the("PrometheusRule")["spec"] == rules
    assert found.the("PrometheusRule")["metadata"]["labels"]["release"] == "prometheus"
    assert not rendered(chart, {}).of_kind("PrometheusRule")


def test_rules_that_are_not_there_are_not_given(chart_with: Any) -> None:
    with pytest.raises(helm_python.HelmError, match=r"prometheusRule.enabled: this chart has no files/rules.yaml"):
        rendered(chart_with({}), {"prometheusRule": {"enabled": True}})


def rules_of(values: dict[str, Any], name: str = "refill") -> dict[str, dict[str, Any]]:
    """By their names."""
    given = {"prometheusRule": {"enabled": True}} | values
    groups = release(given, name).the("PrometheusRule")["spec"]["groups"]
    return {rule.get("alert") or rule["record"]: rule for group in groups for rule in group["rules"]}


def selectors_without_job(expr: str, job: str) -> list[str]:
    """Every name of an expression that is no function, word of the language or label must be followed by it."""
    expr = re.sub(r"\b(by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)", " ", expr)
    named = re.findall(r"(?<![\w:{\"$])([a-zA-Z_:][\w:]*)(?!\s*\(|[\w:])(\s*\{[^}]*\})?", re.sub(r"\[\w+\]", "", expr))
    words = {"and", "or", "unless", "offset", "sum", "count", "bool", "m", "h"}
    return [name for name, chosen in named if name not in words and f'job="{job}"' not in chosen]


@pytest.mark.parametrize("values", [{"podMonitor": SHARED}, {"serviceMonitor": SHARED}], ids=str)
def test_rules_of_a_release_look_at_its_own_pods(values: dict[str, Any]) -> None:
    everywhere = {rule.get("alert") or rule["record"]: rule for group in RULES_IN_CHART for rule in group["rules"]}
    for name, rule in rules_of(values).items():
        assert selectors_without_job(everywhere[name]["expr"], "ml/refill"), name
        assert selectors_without_job(rule["expr"], "ml/refill") == [], name
        assert (
            rule["expr"].replace('{job="ml/refill"}', "").replace('job="ml/refill", ', "") == everywhere[name]["expr"]
        )
        assert rule.get("labels", {}).get("namespace") == ("ml" if "alert" in rule else None)


def test_rules_look_at_the_job_that_is_named_and_at_all_where_the_chart_does_not_know_it() -> None:
    relabelled = {"podMonitor": SHARED | {"relabelings": [{"targetLabel": "job", "replacement": "mine"}]}}
    usual = [rule for group in RULES_IN_CHART for rule in group["rules"]]
    for values in ({}, relabelled):
        assert list(rules_of(values).values()) == usual
    named = rules_of(relabelled | {"prometheusRule": {"enabled": True, "job": "mine"}})
    assert named["RefillPodAway"]["expr"] == 'sum by (job, peer) (refill_peer_away{job="mine"}) > 0'


def test_the_namespace_of_an_alert_may_be_said_otherwise() -> None:
    alerts = {"RefillPodAway": {"labels": {"namespace": "training"}}}
    given = rules_of({"podMonitor": SHARED, "prometheusRule": {"enabled": True, "alerts": alerts}})
    assert given["RefillPodAway"]["labels"] == {"severity": "warning", "namespace": "training"}


def test_two_releases_in_one_prometheus_do_not_alert_for_each_other(tmp_path: Path) -> None:
    """One of them wants no alert of pods that are away, and the other wants it late."""
    for name, change in (("refill", {"enabled": False}), ("other-refill", {"for": "8m"})):
        values = {"podMonitor": SHARED, "prometheusRule": {"enabled": True, "alerts": {"RefillPodAway": change}}}
        spec = release(values, name).the("PrometheusRule")["spec"]
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    jobs = ("ml/refill", "ml/other-refill")
    series = [
        {"series": f'{metric}{{job="{job}", instance="refill-0", training_job="run", {more}}}', "values": values}
        for job in jobs
        for metric, more, values in (
            ("refill_peer_away", 'peer="1"', "1x20"),
            ("refill_waiting_requests", 'peer="1"', "1x20"),
            ("refill_takes_total", 'rank="0"', "0+10x20"),
            ("refill_memory_promised_bytes", "", "5x10 stale"),
        )
    ]
    expected = {
        'count by (job, namespace) (ALERTS{alertname="RefillRequestsWaitForPod"})': {job: 1 for job in jobs},
        'count by (job, namespace) (ALERTS{alertname="RefillDown"})': {job: 1 for job in jobs},
        'count by (job, namespace) (ALERTS{alertname="RefillPodAway"})': {"ml/other-refill": 1},
    }
    asked = [
        {
            "expr": expr,
            "eval_time": "18m",
            "exp_samples": [
                {"labels": f'{{job="{job}", namespace="ml"}}', "value": value} for job, value in found.items()
            ],
        }
        for expr, found in expected.items()
    ]
    recorded = {"expr": "count(training_job:refill_takes:rate5m)", "eval_time": "18m"}
    asked.append(recorded | {"exp_samples": [{"labels": "{}", "value": len(jobs)}]})
    case = {"interval": "1m", "input_series": series, "promql_expr_test": asked}
    files = [f"{name}.yaml" for name in ("refill", "other-refill")]
    tests = {"rule_files": files, "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    succeeds(tool("promtool"), "check", "rules", *(str(tmp_path / file) for file in files))
    succeeds(tool("promtool"), "test", "rules", str(tmp_path / "tests.yaml"))


def test_alerts_link_their_entry_of_the_runbook_where_that_can_be_read() -> None:
    def runbooks(url: str) -> dict[str, str]:
        rules = rules_of({"prometheusRule": {"enabled": True, "runbookUrl": url}})
        notes = {name: rule["annotations"] for name, rule in rules.items() if "alert" in rule}
        links = {name: each.get("runbook_url") for name, each in notes.items()}
        assert links == {name: each["runbook"] if url else None for name, each in notes.items()}, "which tools link"
        return {name: each["runbook"] for name, each in notes.items()}

    assert runbooks("")
    for url in ("https://wiki.example.com/refill/RUNBOOK.md", ""):
        for alert, link in runbooks(url).items():
            assert link == f"{url or 'docs/RUNBOOK.md'}#{alert.lower()}"


JOB_AND_POD = [
    {"targetLabel": "job", "replacement": "ml/refill"},
    {"targetLabel": "instance", "sourceLabels": ["__meta_kubernetes_pod_name"]},
]


def test_a_service_monitor_finds_the_service_that_has_all_pods_and_no_other() -> None:
    found = release({"serviceMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}}})
    monitor = found.the("ServiceMonitor")
    chosen = monitor["spec"]["selector"]["matchLabels"]
    (service,) = [s for s in found.of_kind("Service") if chosen.items() <= s["metadata"]["labels"].items()]
    assert service == found.service("peers")
    assert service["spec"]["publishNotReadyAddresses"], "pods that are not ready are scraped, too"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint == {"port": "metrics", "path": "/metrics", "interval": "15s", "relabelings": JOB_AND_POD}
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_a_pod_monitor_finds_the_pods() -> None:
    found = release({"podMonitor": {"enabled": True}})
    spec = found.the("PodMonitor")["spec"]
    assert spec["selector"]["matchLabels"].items() <= found.pod_template["metadata"]["labels"].items()
    assert spec["podMetricsEndpoints"] == [{"port": "metrics", "path": "/metrics", "relabelings": JOB_AND_POD}]


@pytest.mark.parametrize(
    ("kind", "endpoints"), [("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")]
)
def test_a_monitor_names_release_and_pod_wherever_it_lies_itself(kind: str, endpoints: str) -> None:
    own = {"targetLabel": "instance", "replacement": "mine"}
    found = release({f"{kind[0].lower()}{kind[1:]}": SHARED | {"relabelings": [own]}}).the(kind)
    (endpoint,) = found["spec"][endpoints]
    assert endpoint["relabelings"] == [*JOB_AND_POD, own], "the last one holds"


@pytest.mark.parametrize("kind", ["ServiceMonitor", "PodMonitor", "PrometheusRule"])
def test_the_operator_takes_what_it_is_given(kind: str) -> None:
    values = {"enabled": True, "labels": {"release": "prometheus"}}
    given = release({f"{kind[0].lower()}{kind[1:]}": values | ({"interval": "15s"} if "Monitor" in kind else {})})
    schema = strict(SCHEMAS[kind])
    jsonschema.validate(given.the(kind), schema)
    misspelt = given.the(kind)["spec"] | {"endpoint": []}
    with pytest.raises(jsonschema.ValidationError, match="endpoint"):
        jsonschema.validate(given.the(kind) | {"spec": misspelt}, schema)


def strict(schema: Any) -> Any:
    """With nothing let through that Kubernetes would drop without a word."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(inner) for name, inner in schema.items()}
    # Metadata is Kubernetes' own, and its schema has no parts here.
    return {"additionalProperties": False} | made if isinstance(made.get("properties"), dict) else made
