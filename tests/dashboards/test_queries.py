"""Real pods serve a job under a real Prometheus: every query of every panel and rule returns data."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import yaml
from dashboards.panel_queries import panel_queries, variable_queries
from tests.conftest import free_port
from tests.dashboards.debian_tools import tool
from tests.dashboards.prometheus_server import PrometheusServer
from tests.pod_fixtures import rank_of
from tests.waiting import until

from refill.errors import RefillError
from refill_service.demo.local_cluster import LocalCluster

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
RULES = DASHBOARDS / "rules.yaml"
JOB, PLANNED_JOB = "run-1", "run-2"
QUERIES = list(panel_queries(DASHBOARDS, rate_seconds=10, shown_seconds=60))

SILENT_IN_HEALTH = {
    "refill_store_errors_total": "begins with the first error",
    "instance:refill_store_errors_per_request:ratio_rate5m": "made from these",
}
"""What rules ask for and has no data while all is well. Panels say for themselves that they may be empty."""


@dataclass(frozen=True)
class Watched:
    prometheus: PrometheusServer
    pods: LocalCluster

    def has_data(self, expr: str) -> bool:
        """Whether the query returns a number; of a division of nothing by nothing, it doesn't."""
        return any(series["value"][1] != "NaN" for series in self.prometheus.query(expr))

    def still_without_data(self, exprs: set[str], seconds: float = 60) -> set[str]:
        """Those of the queries that have not returned data, until all have, or for so long."""
        deadline = time.monotonic() + seconds
        while missing := {expr for expr in exprs if not self.has_data(expr)}:
            if time.monotonic() > deadline:
                return missing
            exprs = missing
            time.sleep(0.5)
        return set()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, packed: tuple[str, dict[str, bytes]]) -> Iterator[Watched]:
    """Three pods that a job of two ranks, and one of one, ask for epoch after epoch, until the tests have ended."""
    program, folder = tool("prometheus"), tmp_path_factory.mktemp("prometheus")
    settings: dict[str, str | int | float] = {"memory_bytes": "4MiB", "wait_seconds": 1, "pinned_fraction": 0.02}
    job = {"name": JOB, "dataset": packed[0], "chunk_size": 16, "memory_bytes": 300_000, "world_size": 2}
    job["policy"] = "redox"  # misses and wastes all the time, so that there is something to see of both
    planned = job | {"name": PLANNED_JOB, "policy": "planned", "world_size": 1}
    enough = threading.Event()
    with (
        LocalCluster(3, folder, settings) as pods,
        PrometheusServer(program, folder, free_port(), RULES, pods.pod_urls) as prometheus,
        ThreadPoolExecutor() as threads,
    ):
        ranks = [threads.submit(train, pods, job, rank, enough) for rank in range(2)]
        ranks.append(threads.submit(train, pods, planned, 0, enough))
        try:
            yield Watched(prometheus, pods)
        finally:
            enough.set()
        for rank in ranks:
            rank.result()


def train(pods: LocalCluster, job: dict[str, Any], rank: int, enough: threading.Event) -> None:
    """Epochs in small batches, each with a report, until it is enough and the epoch has ended."""
    connection = rank_of(pods, job, rank)
    length = connection.info()["samples_per_rank"]
    epoch = 0
    while not enough.is_set():
        for start in range(0, length, 10):
            enough.wait(0.03)
            positions = np.arange(start, min(start + 10, length))
            received = connection.batch(epoch, positions)
            connection.report(0.001, len(positions), received.num_bytes)
        epoch += 1


def test_every_panel_shows_data_while_a_job_runs(watched: Watched) -> None:
    missing = watched.still_without_data({query.expr for query in QUERIES if not query.quiet})
    assert not missing, [query for query in QUERIES if query.expr in missing]


def test_panels_say_what_they_have_nothing_of_where_all_jobs_are_planned(
    tmp_path: Path, packed: tuple[str, dict[str, bytes]]
) -> None:
    job = {"name": PLANNED_JOB, "dataset": packed[0], "chunk_size": 16, "memory_bytes": 300_000, "world_size": 1}
    with LocalCluster(3, tmp_path, {"memory_bytes": "4MiB", "wait_seconds": 1, "pinned_fraction": 0.02}) as pods:
        connection = rank_of(pods, job | {"policy": "planned"}, 0)
        for epoch in range(2):
            positions = np.arange(connection.info()["samples_per_rank"])
            received = connection.batch(epoch, positions)
            connection.report(0.001, len(positions), received.num_bytes)
        metrics = "".join(httpx.get(f"{url}/metrics").text for url in pods.pod_urls)
    there = set(re.findall(r"^(\w+)[{ ]", metrics, re.MULTILINE))
    empty = {query.panel for query in QUERIES if not query.quiet and metrics_in(query.expr) - there}
    assert not empty


def test_metrics_follow_prometheus_conventions(watched: Watched) -> None:
    metrics = httpx.get(f"{watched.pods.pod_urls[0]}/metrics").text
    lint = subprocess.run([tool("promtool"), "check", "metrics"], input=metrics, capture_output=True, text=True)
    complaints = [line for line in (lint.stdout + lint.stderr).splitlines() if line.startswith("refill_")]
    assert (complaints, lint.returncode in (0, 3)) == ([], True), lint.stderr


def test_every_choice_at_the_top_has_something_to_choose(watched: Watched) -> None:
    for selector, label in variable_queries(DASHBOARDS):
        assert not watched.still_without_data({selector})
        assert {series["metric"][label] for series in watched.prometheus.query(selector)} <= {
            "refill",
            JOB,
            PLANNED_JOB,
        }


def test_recorded_rules_have_data_and_alerts_ask_for_what_exists(watched: Watched) -> None:
    asked = {name for rule in rules() for name in metrics_in(rule["expr"])} | {
        rule["record"] for rule in rules() if "record" in rule
    }
    assert set(SILENT_IN_HEALTH) < asked
    assert not watched.still_without_data(asked - set(SILENT_IN_HEALTH))


def test_no_alert_is_on_while_all_is_well(watched: Watched) -> None:
    def on() -> set[str]:
        """Those that are, or that say nothing so far."""
        found = watched.prometheus.rules()
        return {each["name"] for each in found if each["health"] != "ok" or each.get("state", "inactive") != "inactive"}

    until(lambda: not on(), "all rules, with no alert on")


def test_what_is_silent_in_health_speaks_after_errors(
    watched: Watched, packed: tuple[str, dict[str, bytes]], tmp_path: Path
) -> None:
    shutil.copy(Path(urlsplit(packed[0]).path) / "refill.index", tmp_path)  # and none of its blobs
    job = {"name": "other", "dataset": tmp_path.as_uri(), "chunk_size": 16, "memory_bytes": 300_000, "world_size": 1}
    with pytest.raises(RefillError, match="blob"):
        rank_of(watched.pods, job | {"policy": "planned"}, 0).samples(np.arange(1))
    exprs = set(SILENT_IN_HEALTH) | {query.expr for query in QUERIES if query.quiet}
    missing = watched.still_without_data(exprs)
    assert not missing, [query for query in QUERIES if query.expr in missing] or missing


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def metrics_in(expr: str) -> set[str]:
    """Names of metrics, ours or recorded; names of labels have neither a colon nor our prefix."""
    return set(re.findall(r"\b(?:\w+(?::\w+)+|(?:refill|process)_\w+)\b", expr))
