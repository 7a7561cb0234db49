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
POLICIES = {"keyed": ("redox", "planned"), "explicit": ("planned", "exact")}
"""By the order of the job."""


def analyzed(dataset: str, num_pods: int, memory: str, order: str) -> dict[str, dict[str, Any]]:
    """Its rows, by policy."""
    sizes = [part for policy in POLICIES[order] for part in (f"--{policy}-chunk-sizes", str(CHUNK_SIZE))]
    command = ["analyze", dataset, "--pods", str(num_pods), "--pod-memory", memory, *sizes, "--order", order, "--json"]
    done = run_refill(command)
    assert done.returncode == 0, done.stderr
    return {row["policy"]: row for row in json.loads(done.stdout)["rows"]}


@pytest.mark.variants("3-4MiB", "1-2MiB")
@pytest.mark.parametrize(
    ("num_pods", "memory", "order"),
    [
        (1, "1MiB", "keyed"),
        (3, "1MiB", "keyed"),
        (3, "4MiB", "keyed"),
        (1, "2MiB", "explicit"),
        (3, "4MiB", "explicit"),
    ],
)
def test_a_job_that_is_alone_has_what_analyze_says(
    packed: tuple[str, dict[str, bytes]], tmp_path: Path, num_pods: int, memory: str, order: str
) -> None:
    """Memory for a part of the dataset, and for all of it; of lists a part is set aside."""
    rows = analyzed(packed[0], num_pods, memory, order)
    with LocalCluster(num_pods, tmp_path, {"memory_bytes": memory}) as pods:
        for policy in POLICIES[order]:
            job = settings_of(packed[0], policy=policy, order=order, chunk_size=CHUNK_SIZE, memory_bytes=0)
            rank = rank_of(pods, job)
            rank.info()
            info = httpx.get(f"{pods.pod_urls[0]}/v1/jobs/{job['name']}").json()
            row = rows[policy]
            # A planned job with lists grows after it was planned, in steps of 64 KiB.
            grows = order == "explicit" and policy == "planned"
            steps, chunks = (1 << 16, row["chunks_in_memory"] // 10) if grows else (0, 0)
            assert info["memory_bytes"] == pytest.approx(row["job_memory_bytes"], rel=0, abs=steps), policy
            assert info["chunks_in_memory"] == pytest.approx(row["chunks_in_memory"], rel=0, abs=chunks), policy
            if policy == "planned":
                plan = PlanSettings.from_dict(info["plan"])
                assert plan.policy_settings() == row["plan"]
            rank.end_job()
