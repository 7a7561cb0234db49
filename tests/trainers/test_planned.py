"""Training in planned orders: the same steps on any number of ranks, and batches that ranks share."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from tests.trainers.launching import NUM_SAMPLES, SCRIPTS, Place, ids_of

STEPS = 2 * -(-NUM_SAMPLES // 32)


class Run(NamedTuple):
    """By step: the loss, and the samples of all ranks."""

    losses: dict[int, float]
    ids: dict[int, list[int]]


def run_of(place: Place, processes: int, state: Path, stop_at: int = 0, job: str = "") -> Run:
    arguments = job or place.new_job(), state, stop_at
    done = place.launch(SCRIPTS / "equal_runs_job.py", *arguments, processes=processes, seconds=300).checked()
    steps = {line["step"] for line in done.lines}
    losses = {line["step"]: line["loss"] for line in done.lines}
    return Run(losses, {step: sorted(ids_of(done.lines, step=step)) for step in steps})


@pytest.mark.timeout(600)
def test_runs_are_equal_and_resumed_with_another_number_of_ranks(place: Place, tmp_path: Path) -> None:
    """Losses are equal to the bit for one number of ranks. For another one sums of gradients differ in the last."""
    alone = run_of(place, 1, tmp_path / "none")
    again = run_of(place, 1, tmp_path / "none")
    assert sorted(alone.losses) == list(range(1, STEPS + 1))
    assert alone == again
    job, state = place.new_job(), tmp_path / "state"
    on_two = run_of(place, 2, state, STEPS // 2 + 5, job)
    resumed = run_of(place, 1, state, job=job)
    assert alone.ids == on_two.ids | resumed.ids, "a step was of other samples"
    assert alone.losses == pytest.approx(on_two.losses | resumed.losses, rel=1e-9)


@pytest.mark.every_number
@pytest.mark.timeout(600)
def test_ranks_of_a_tensor_parallel_group_get_the_same_batches(place: Place) -> None:
    """FSDP2 x tensor parallelism, 2 x 2 processes."""
    done = place.launch(SCRIPTS / "parallel_job.py", place.new_job(), processes=4, seconds=500).checked()
    for epoch in range(2):
        for group in range(2):
            of_members = [ids_of(done.lines, epoch=epoch, group=group, member=member) for member in range(2)]
            assert of_members[0] == of_members[1], f"epoch {epoch}: the ranks of group {group} got different batches"
        ids = [i for group in range(2) for i in ids_of(done.lines, epoch=epoch, group=group, member=0)]
        assert sorted(ids) == list(range(NUM_SAMPLES)), f"epoch {epoch} was not each sample once"
