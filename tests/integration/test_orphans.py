"""Loader workers whose training process was killed end by themselves, and pods know that the rank is gone."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.forked_processes import start_rank
from tests.waiting import until

from refill_service.demo.local_cluster import LocalCluster

TRAINING = Path(__file__).parent / "orphaned_training.py"
MOST_SECONDS = 60
"""A second or two; on a machine that is busy, more."""


@pytest.mark.parametrize(
    ("method", "waits_for"),
    [
        ("fork", "the loop"),
        ("fork", "another rank"),
        *(
            pytest.param(method, waits_for, marks=pytest.mark.variant)
            for method in ("spawn", "forkserver")
            for waits_for in ("the loop", "another rank")
        ),
    ],
)
def test_workers_of_a_killed_training_process_end(
    three_pods: LocalCluster, job: dict[str, Any], method: str, waits_for: str
) -> None:
    def ranks_alive() -> int:
        """As all pods see it."""
        listed = [each for url in three_pods.pod_urls for each in httpx.get(f"{url}/v1/jobs").json()]
        return sum(each["ranks_alive"] for each in listed if each["spec"]["name"] == job["name"])

    world_size = 1 if waits_for == "the loop" else 2
    arguments = {"job": job["name"]} | {name: job[name] for name in job if name != "name"}
    arguments |= {"service_url": three_pods.pod_urls[0], "rank": 0, "world_size": world_size}
    about = {"dataset": arguments, "method": method, "waits_for_another_rank": world_size > 1}
    with ExitStack() as stack:
        training, its_input, its_output = start_rank(TRAINING, json.dumps(about))
        stack.enter_context(its_input)
        stack.enter_context(its_output)
        stack.callback(training.kill)
        workers = json.loads(its_output.readline())
        assert len(workers) == 2
        ends = [os.pidfd_open(worker) for worker in workers]
        for end in ends:
            stack.callback(_ended, end)
        until(lambda: ranks_alive() == 1, "the rank")
        training.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        for worker, end in zip(workers, ends, strict=True):
            left = killed + MOST_SECONDS - time.monotonic()
            assert select.select([end], [], [], max(0, left))[0], f"worker {worker} has outlived the training process"
        until(lambda: ranks_alive() == 0, "the rank's end")


def _ended(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    os.close(process)
