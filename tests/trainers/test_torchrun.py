"""Do plain DDP and FSDP2 go on under ``torchrun --max-restarts`` when a worker is killed in mid-epoch?"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trainers.launching import NUM_SAMPLES, SCRIPTS, Place, check_exact, ids_of, in_every_number_of_processes


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", in_every_number_of_processes(2))
def test_torchrun_starts_ranks_again_and_they_get_what_they_have_not_had(
    place: Place, tmp_path: Path, processes: int
) -> None:
    job = place.new_job()
    done = place.launch(
        SCRIPTS / "torchrun_job.py", job, tmp_path, processes=processes, max_restarts=2, seconds=500
    ).checked()
    saved_at = NUM_SAMPLES // 16 // processes // 2
    for kind, killed_in in (("ddp", 0), ("fsdp2", 1)):
        lines = [line for line in done.lines if line["kind"] == kind]
        before = [line for line in lines if line["attempt"] == killed_in and line["step"] <= saved_at]
        after = [line for line in lines if line["attempt"] == killed_in + 1]
        assert before
        assert after
        for epoch in range(2):
            check_exact(place, f"{job}-{kind}", epoch, ids_of(before + after, epoch=epoch))
