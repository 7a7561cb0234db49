"""A pod's machine goes without a word, and its successor has another address: what that costs is its start, and little
more. Not the time of a request, in which an answer may come."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

REQUEST_SECONDS = 60
"""What an answer may take. Half of it is far more than noticing that a pod is gone takes, on a busy machine, too."""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nsenter"),
    reason="needs root, ip and nsenter, for networks of its own",
)


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param("replaced", marks=pytest.mark.variant),
        "machine-lost",
        pytest.param("lost-while-answering", marks=pytest.mark.variant),
    ],
)
def test_training_goes_on_when_the_successor_is_there(failure: str) -> None:
    stall = stalled_by(failure, "planned")
    beyond = stall["stall_seconds"] - stall["outage_seconds"]
    assert beyond < REQUEST_SECONDS / 2, f"training stood still {beyond:.0f} s longer than the pod was away: {stall}"


@pytest.mark.variant
def test_a_pod_that_stands_still_is_not_cut_off() -> None:
    stall = stalled_by("paused", "redox")
    assert "is gone" not in stall["said"], stall
    assert "can't connect" not in stall["said"], stall


@pytest.mark.variant
def test_a_network_that_is_cut_is_named_with_the_address() -> None:
    stall = stalled_by("network-cut", "redox")
    assert "can't connect to 10.77.0.3:8000: timed out after 2 s" in stall["said"], stall


def stalled_by(failure: str, policy: str) -> dict[str, Any]:
    """A live job waits for the pod, and is lost if its memory is; others stand in for one of a planned job."""
    command = [sys.executable, "-m", "benchmarks.stalls", "--policy", policy, "--json", "--only", failure]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    if "no network namespaces here" in done.stderr:
        pytest.skip("no network namespaces here")
    assert done.returncode == 0, done.stderr[-3000:]
    stall: dict[str, Any] = json.loads(done.stdout)[0]
    assert stall["epochs"] > 0, "no epoch was whole"
    return stall
