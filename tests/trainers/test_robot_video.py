"""The example of windows of video: cut without encoding again, decoded by torchcodec, each window once an epoch."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

av = pytest.importorskip("av", reason="PyAV is not installed")
try:
    from torchcodec.decoders import VideoDecoder
except (ImportError, RuntimeError, OSError):
    pytest.skip("torchcodec is not installed, or finds no FFmpeg", allow_module_level=True)

EXAMPLE = Path(__file__).parents[2] / "examples" / "robot_video.py"
EPISODES, FRAMES, LENGTH = 8, 64, 16


@pytest.mark.timeout(400)
def test_windows_of_video_are_those_frames_and_train_a_policy(tmp_path: Path) -> None:
    def run(*arguments: object) -> str:
        command = [sys.executable, str(EXAMPLE), *map(str, arguments)]
        alone = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=alone)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    run("record", tmp_path / "robot")
    run("cut", tmp_path / "robot", tmp_path / "windows", LENGTH)
    whole = VideoDecoder(str(next(tmp_path.glob("robot/videos/*/*/episode_000003.mp4"))))
    window = VideoDecoder((tmp_path / "windows" / "episode_000003_000032.mp4").read_bytes())
    assert (window[:] == whole[32 : 32 + LENGTH]).all()
    store = tmp_path / "store"
    store.mkdir()
    asyncio.run(pack(str(tmp_path / "windows"), store.as_uri()))
    with LocalCluster(2, tmp_path, {"memory_bytes": "16MiB", "wait_seconds": 1}) as pods:
        said = run("train", pods.pod_urls[0], f"robot-{uuid.uuid4().hex[:8]}", store.as_uri())
    found = re.findall(r"epoch \d: (\d+) windows, (\d+) different, loss (\S+)", said)
    assert [(int(count), int(different)) for count, different, _ in found] == [(EPISODES * FRAMES // LENGTH,) * 2] * 8
    assert float(found[-1][2]) < float(found[0][2]) / 2
