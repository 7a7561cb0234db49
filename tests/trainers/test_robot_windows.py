"""The example of windows of episodes learns, and each window comes once an epoch."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest
from tests.trainers.launching import launched

from refill_service.cli import main
from refill_service.demo.local_cluster import LocalCluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "robot_windows.py"
WINDOWS = 12 * ((60 - 16) // 8 + 1)


@pytest.mark.variant
@pytest.mark.timeout(400)
def test_windows_of_episodes_train_a_policy(tmp_path: Path) -> None:
    status, said = launched([str(EXAMPLE), "prepare", str(tmp_path)], tmp_path / "said.log", processes=1, cwd=tmp_path)
    assert status == 0, said
    data = tmp_path / "data"
    assert main(["index", str(data), "--windows", "16,8", "--quiet"]) == 0
    with LocalCluster(2, tmp_path, {"memory_bytes": "16MiB", "wait_seconds": 1}) as pods:
        arguments = ["train", pods.pod_urls[0], f"robot-{uuid.uuid4().hex[:8]}", data.as_uri()]
        status, said = launched([str(EXAMPLE), *arguments], tmp_path / "said.log", processes=1, cwd=tmp_path)
    assert status == 0, said[-4000:]
    found = re.findall(r"epoch \d: (\d+) windows, (\d+) different, loss (\S+)", said)
    assert [(int(count), int(different)) for count, different, _ in found] == [(WINDOWS, WINDOWS)] * 8
    assert float(found[-1][2]) < float(found[0][2]) / 3
