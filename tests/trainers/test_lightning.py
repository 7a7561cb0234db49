"""Is Lightning right as people use it: strategy ddp, samplers left to it, its own checkpoints, fit(ckpt_path)?"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from tests.trainers.launching import (
    NUM_SAMPLES,
    SCRIPTS,
    Launched,
    Place,
    check_exact,
    ids_of,
    in_every_number_of_processes,
)

SCRIPT = SCRIPTS / "lightning_job.py"
CASES = {
    1: ["timed-0", "stateful-2", "iterable-2", "timed-2"],
    2: ["validated-1", "last-1", "plain-0", "plain-1", "stateful-1", "timed-1"],
    4: ["validated-1", "last-1", "plain-0", "plain-1", "stateful-1", "timed-1"],
}
"""The last one is killed by SIGKILL, and those before in the same process stop."""


class Trained(NamedTuple):
    place: Place
    processes: int
    job: str
    """Its cases are jobs of this name, and their own."""
    first: Launched
    """Was killed."""
    resumed: Launched


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("processes", in_every_number_of_processes(2))
def test_a_run_that_was_killed_and_went_on(place: Place, tmp_path: Path, processes: int) -> None:
    """All cases in two launches: starting them is most of what this costs."""
    job = place.new_job()
    first, resumed = (
        place.launch(SCRIPT, job, tmp_path, phase, *CASES[processes], processes=processes, seconds=500)
        for phase in ("first", "resumed")
    )
    assert first.returncode == -9 or "(SIGKILL)" in first.output, first.output[-4000:]
    trained = Trained(place, processes, job, first, resumed.checked())
    in_mid_epoch_it_goes_on_with_what_it_has_not_had(trained)
    after_a_checkpoint_of_an_epochs_end_the_next_one_is_served_to_any_loader(trained)
    in_mid_epoch_a_loader_without_a_state_is_refused(trained)
    limited_epochs_begin_anew_and_validation_is_in_order_and_whole(trained)


def steps_of_epoch(processes: int) -> int:
    return -(-NUM_SAMPLES // (8 * processes))


def trained_with(first: Launched, resumed: Launched, case: str, epoch: int, saved_at: int) -> list[int]:
    """What the model of the second run has seen: of the first run what came before the checkpoint."""
    before = [line for line in first.lines if line.get("step", 0) <= saved_at]
    return ids_of(before + resumed.lines, case=case, epoch=epoch, kind="train")


def in_mid_epoch_it_goes_on_with_what_it_has_not_had(trained: Trained) -> None:
    place, processes, job, first, resumed = trained
    steps = steps_of_epoch(processes)
    for case in CASES[processes]:
        if case.startswith(("timed", "stateful", "iterable")):
            for epoch in range(3):
                check_exact(place, f"{job}-{case}", epoch, trained_with(first, resumed, case, epoch, steps * 3 // 2))


def after_a_checkpoint_of_an_epochs_end_the_next_one_is_served_to_any_loader(trained: Trained) -> None:
    place, processes, job, first, resumed = trained
    steps = steps_of_epoch(processes)
    for case in CASES[processes]:
        if case.startswith(("validated", "last")):
            for epoch in range(3):
                check_exact(place, f"{job}-{case}", epoch, trained_with(first, resumed, case, epoch, steps * 2))


def in_mid_epoch_a_loader_without_a_state_is_refused(trained: Trained) -> None:
    _, processes, _, _, resumed = trained
    errors = [line for line in resumed.lines if line["kind"] == "error"]
    plain = [case for case in CASES[processes] if case.startswith("plain")]
    assert sorted(line["case"] for line in errors) == sorted(plain * processes)
    assert all("InvalidInput: Lightning goes on after " in line["error"] for line in errors)
    assert all("refill.timed(loader, dataset)" in line["error"] for line in errors)


def limited_epochs_begin_anew_and_validation_is_in_order_and_whole(trained: Trained) -> None:
    place, processes, job, first, _ = trained
    for epoch in range(3):
        ids = ids_of(first.lines, case="limited", epoch=epoch, kind="train")
        assert len(ids) == len(set(ids)) == steps_of_epoch(processes) // 2 * 8 * processes
        validated = ids_of(first.lines, case="limited", epoch=epoch, kind="validation")
        check_exact(place, f"{job}-limited-validation", epoch, validated)
        for rank in range(processes):
            own = ids_of(first.lines, case="limited", epoch=epoch, kind="validation", rank=rank)
            assert own == list(range(rank, NUM_SAMPLES, processes))
    assert len(ids_of(first.lines, case="limited", kind="sanity")) == 2 * 8 * processes
