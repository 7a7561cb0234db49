"""Ray Train: the example's workers divide each epoch, and go on after one of them was killed."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.trainers.launching import Place

from refill_service.datasets.pack import pack
from refill_service.demo.digits import write_digits
from refill_service.demo.local_cluster import LocalCluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_example.py"
NUM_DIGITS = 1500

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


@pytest.mark.timeout(1000)
def test_workers_go_on_after_one_was_killed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    train, _ = write_digits(tmp_path)
    asyncio.run(pack(str(train), store.as_uri(), blob_bytes=100_000))
    with LocalCluster(2, tmp_path, {"memory_bytes": "64MiB", "wait_seconds": 1}) as cluster:
        job = f"ray-{uuid.uuid4().hex[:8]}"
        command = [sys.executable, str(EXAMPLE), cluster.pod_urls[0], store.as_uri(), job, str(tmp_path / "kept")]
        # A cluster of its own, on a machine that may be busy.
        patient = ("RAY_raylet_start_wait_time_s", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "RAY_ADDRESS": ""} | dict.fromkeys(patient, "300")
        environment["RAY_TRAIN_V2_ENABLED"] = "1"  # what is there without it from 2.51 on
        ended = subprocess.run(
            [*command, "--crash-at", "35"], capture_output=True, text=True, env=environment, timeout=900
        )
        output = ended.stdout + ended.stderr
        assert ended.returncode == 0, output[-4000:]
        # Each once, though Ray may show a line twice; from the last checkpoint that it had taken, which it does behind
        # the loop's back.
        went_on = set(re.findall(r"rank (\d) goes on in epoch \d after step (\d+)", output))
        assert sorted(rank for rank, _ in went_on) == ["0", "1"]
        assert {int(step) for _, step in went_on} <= {10, 20, 30}
        place = Place(cluster, store.as_uri(), tmp_path)
        for epoch in range(3):
            assert f"epoch {epoch}: {NUM_DIGITS} samples on 2 ranks" in output
            assert place.receipt(job, epoch)["exact"]
