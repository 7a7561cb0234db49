"""The example for Ray Train: stopped, it goes on from its checkpoint with other workers, each sample once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.trainers.launching import NUM_SAMPLES, Place

pytest.importorskip("ray.train", reason="Ray Train is not installed")
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_example.py"


@pytest.mark.timeout(900)
def test_the_example_goes_on_with_other_workers_and_each_sample_comes_once(place: Place, tmp_path: Path) -> None:
    job = place.new_job()

    def had(workers: int, *stop: str) -> dict[int, list[int]]:
        command = [sys.executable, EXAMPLE, place.url, place.dataset, job, tmp_path / "results", *stop]
        alone = {"WORKERS": str(workers), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=os.environ | alone)
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[int, list[int]] = {0: [], 1: []}
        for epoch, ids in re.findall(r"epoch (\d) ids \[([\d, ]+)\]", done.stdout + done.stderr):
            found[int(epoch)] += map(int, ids.split(","))
        return found

    first, rest = had(2, "10"), had(1)
    assert len(first[0]) == 2 * 10 * 10
    assert len(rest[0]) == NUM_SAMPLES - 2 * 8 * 10, "it goes on from step 8"
    assert sorted(rest[1]) == list(range(NUM_SAMPLES))
    assert set(first[0]) | set(rest[0]) == set(range(NUM_SAMPLES))
    again = Counter(first[0]) + Counter(rest[0])
    assert again.total() - NUM_SAMPLES == 2 * 2 * 10, "nothing comes again but the steps after the checkpoint"
