"""``refill jobs`` and ``refill end`` against real pods."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.integration.job_ranks import exact_receipt
from tests.pod_fixtures import rank_of, whole_epoch

from refill.errors import PodUnreachable
from refill_service.cli import main
from refill_service.commands import jobs
from refill_service.demo.local_cluster import LocalCluster


def listed(pods: LocalCluster, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    assert main(["jobs", "--json", "--url", pods.pod_urls[1]]) == 0
    return {job["name"]: job for job in json.loads(capsys.readouterr().out)}


def test_jobs_are_listed_with_who_uses_them_and_ended(
    three_pods: LocalCluster, job: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    name = job["name"]
    assert name not in listed(three_pods, capsys)
    rank = rank_of(three_pods, job, 0)
    rank.info()
    before = listed(three_pods, capsys)[name]
    assert (before["epoch"], before["world_size"]) == (None, 1)
    whole_epoch(rank, 0)
    after = listed(three_pods, capsys)[name]
    assert (after["epoch"], after["dataset"], after["policy"]) == (0, job["dataset"], "planned")
    assert after["ranks_alive"] == 1, "which asked each of the three pods"
    assert after["memory_bytes"] == 3 * rank.info()["memory_bytes"], "of all three pods"
    assert main(["jobs", "--url", three_pods.pod_urls[0]]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["JOB", "EPOCH", "RANKS", "MEMORY", "LAST", "ASKED", "POLICY", "DATASET"]
    assert any(line.split()[:2] == [name, "0"] for line in lines)

    exact_receipt(three_pods, job, 0)
    assert main(["end", name, "--url", three_pods.pod_urls[2]]) == 0
    assert capsys.readouterr().out == f"job {name} was ended\n"
    assert name not in listed(three_pods, capsys)

    assert main(["jobs", "--ended", "--url", three_pods.pod_urls[0]]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["JOB", "RUN", "EPOCHS", "ENDED", "POLICY", "DATASET"]
    (run,) = (line.split()[1] for line in lines if line.split()[0] == name)
    for which in ([], ["--run", run]):
        assert main(["receipt", name, "0", *which, "--url", three_pods.pod_urls[1]]) == 0
        assert f"run {run}, ended): exact" in capsys.readouterr().out
    assert main(["receipt", name, "0", "--run", "ffffffff", "--url", three_pods.pod_urls[1]]) == 2
    assert f"no pod knows run ffffffff of job {name}" in capsys.readouterr().err


def test_a_pod_that_is_away_hides_no_jobs_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {"job": "a", "run": "0123", "first_epoch": 0, "last_epoch": 2, "ended_at": 0, "policy": "planned"}
    away = {"http://b:8000"}

    def ask(client: object, method: str, url: str, path: str) -> Any:
        if path == "/v1/pods":
            return {"pods": ["http://a:8000", "http://b:8000"]}
        if url in away:
            raise PodUnreachable(f"{url} does not answer", url=url)
        return [run | {"dataset": "file:///a"}]

    monkeypatch.setattr(jobs, "ask", ask)
    assert main(["jobs", "--ended", "--json", "--url", "http://a:8000"]) == 0
    said = capsys.readouterr()
    assert [found["run"] for found in json.loads(said.out)] == ["0123"]
    assert said.err == "refill: without what that pod knows: http://b:8000 does not answer\n"
    away.add("http://a:8000")
    assert main(["jobs", "--ended", "--url", "http://a:8000"]) == 2, "when none answers, nobody knows"


def test_what_can_not_be_listed_or_ended_is_said_in_one_line(
    three_pods: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv, says in (
        (["end", "no-such-job", "--url", three_pods.pod_urls[0]], "no pod knows a job no-such-job"),
        (["jobs", "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer"),
        (["jobs", "--url", "refill"], "--url 'refill' is not the URL of a service"),
    ):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
