"""`refill analyze --pod-memory` says what pods do: a job that is alone there has what it says, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.forked_processes import run_refill
from tests.pod_fixtures import rank_of, settings_of

from refill.protocol.plan_settings import PlanSettings
from refill_service.demo.local_cluster import LocalCluster

CHUNK_SIZE = 4
POLICIES = ("redox", "planned")


def analyzed(dataset: str, num_pods: int, memory: str) -> dict[str, dict[str, Any]]:
    """Its rows, by policy."""
    sizes = [part for policy in POLICIES for part in (f"--{policy}-chunk-sizes", str(CHUNK_SIZE))]
    command = ["analyze", dataset, "--pods", str(num_pods), "--pod-memory", memory, *sizes, "--json"]
    done = run_refill(command)
    assert done.returncode == 0, done.stderr
    return {row["policy"]: row for row in json.loads(done.stdout)["rows"]}


@pytest.mark.parametrize(("num_pods", "memory"), [(1, "1MiB"), (3, "1MiB"), (3, "4MiB")])
def test_a_job_that_is_alone_has_what_analyze_says(
    packed: tuple[str, dict[str, bytes]], tmp_path: Path, num_pods: int, memory: str
) -> None:
    """Memory for a part of the dataset, and for all of it."""
    rows = analyzed(packed[0], num_pods, memory)
    with LocalCluster(num_pods, tmp_path, {"memory_bytes": memory}) as pods:
        for policy in POLICIES:
            job = settings_of(packed[0], policy=policy, chunk_size=CHUNK_SIZE, memory_bytes=0)
            rank = rank_of(pods, job)
            rank.info()
            info = httpx.get(f"{pods.pod_urls[0]}/v1/jobs/{job['name']}").json()
            row = rows[policy]
            assert info["memory_bytes"] == row["job_memory_bytes"], policy
            assert info["chunks_in_memory"] == row["chunks_in_memory"], policy
            if policy == "planned":
                plan = PlanSettings.from_dict(info["plan"])
                assert plan.policy_settings() == row["plan"]
            rank.end_job()
