"""Does torchdata's StatefulDataLoader go on from a state of rank 0 on every rank?"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trainers.launching import SCRIPTS, Place, check_exact, ids_of


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("processes", "workers"),
    [
        (2, 1),
        pytest.param(1, 2, marks=pytest.mark.every_number),
        pytest.param(4, 1, marks=pytest.mark.every_number),
    ],
)
def test_a_killed_run_goes_on_with_what_it_has_not_had(
    place: Place, tmp_path: Path, processes: int, workers: int
) -> None:
    job, state = place.new_job(), tmp_path / "state.pt"
    kill_at = 40 // processes
    arguments = (job, state, workers, kill_at)
    killed = place.launch(SCRIPTS / "stateful_job.py", *arguments, processes=processes)
    assert killed.returncode != 0
    resumed = place.launch(SCRIPTS / "stateful_job.py", *arguments, processes=processes).checked()
    before = [line for line in killed.lines if line["step"] <= kill_at - 3]
    check_exact(place, job, 0, ids_of(before, epoch=0) + ids_of(resumed.lines, epoch=0))
    check_exact(place, job, 1, ids_of(resumed.lines, epoch=1))
