"""The example that reads LeRobot's videos learns from them, and each window comes once an epoch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.formats.lerobot_files import write_lerobot

from refill_service.cli import main
from refill_service.demo.local_cluster import LocalCluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "robot_videos.py"
EPISODES = (60, 41, 52)
WINDOWS = sum((count - 16) // 8 + 1 for count in EPISODES)

pytestmark = [
    pytest.mark.skipif(find_spec("av") is None, reason="videos are written by PyAV, which is not installed"),
    pytest.mark.skipif(find_spec("torchcodec") is None, reason="torchcodec, which decodes them, is not installed"),
]


def ffmpeg_of_av(folder: Path) -> str:
    """A folder with the libraries of FFmpeg that PyAV brings, under the names that torchcodec looks for."""
    spec = find_spec("av")
    assert spec is not None
    assert spec.origin is not None
    folder.mkdir()
    bundled = Path(spec.origin).parent.parent / "av.libs"
    for library in bundled.glob("lib*.so.*"):
        if found := re.match(r"(lib(?:av|sw)\w+)-\w+\.so\.(\d+)", library.name):
            (folder / f"{found[1]}.so.{found[2]}").symlink_to(library)
    return f"{folder}:{bundled}"


@pytest.mark.variant
@pytest.mark.timeout(400)
@pytest.mark.parametrize("version", [pytest.param("v2.1", marks=pytest.mark.variant), "v3.0"])
def test_windows_of_videos_train_a_policy(tmp_path: Path, version: str) -> None:
    data = tmp_path / "data"
    write_lerobot(data, EPISODES, version=version)
    assert main(["index", str(data), "--windows", "16,8", "--quiet"]) == 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": ffmpeg_of_av(tmp_path / "ffmpeg")}
    with LocalCluster(2, tmp_path, {"memory_bytes": "16MiB", "wait_seconds": 1}) as pods:
        command = [sys.executable, str(EXAMPLE), pods.pod_urls[0], f"robot-{uuid.uuid4().hex[:8]}", data.as_uri()]
        # Not forked: libraries are looked for where the environment says as a process begins.
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = re.findall(r"epoch \d: (\d+) windows, (\d+) different, loss (\S+)", ended.stdout)
    assert [(int(count), int(different)) for count, different, _ in found] == [(WINDOWS, WINDOWS)] * 6
    assert float(found[-1][2]) < float(found[0][2]) / 3
