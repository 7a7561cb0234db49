"""Is Lightning right as people use it: strategy ddp, samplers left to it, its own checkpoints, fit(ckpt_path)?"""

from __future__ import annotations

from typing import Any

import pytest
from tests.trainers.launching import NUM_SAMPLES, SCRIPTS, Launched, Place, check_exact, ids_of

SCRIPT = SCRIPTS / "lightning_job.py"
CASES = {
    1: ["timed-0", "stateful-2", "iterable-2", "timed-2"],
    2: ["validated-1", "last-1", "plain-0", "plain-1", "stateful-1", "timed-1"],
    4: ["validated-1", "last-1", "plain-0", "plain-1", "stateful-1", "timed-1"],
}
"""The last one is killed by SIGKILL, and those before in the same process stop."""


FOUR = pytest.param(4, id="4 processes", marks=pytest.mark.every_number)


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="1 process"), pytest.param(2, id="2 processes"), FOUR],
)
def trained(place: Place, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """``(processes, name of the jobs, the run that was killed, the one that went on)``."""
    processes, job, folder = request.param, place.new_job(), tmp_path_factory.mktemp("lightning")
    first, resumed = (
        place.launch(SCRIPT, job, folder, phase, *CASES[processes], processes=processes, seconds=500)
        for phase in ("first", "resumed")
    )
    assert first.returncode == -9 or "(SIGKILL)" in first.output, first.output[-4000:]
    return processes, job, first, resumed.checked()


pytestmark = pytest.mark.timeout(1000)


def steps_of_epoch(processes: int) -> int:
    return -(-NUM_SAMPLES // (8 * processes))


def trained_with(first: Launched, resumed: Launched, case: str, epoch: int, saved_at: int) -> list[int]:
    """What the model of the second run has seen: of the first run what came before the checkpoint."""
    before = [line for line in first.lines if line.get("step", 0) <= saved_at]
    return ids_of(before + resumed.lines, case=case, epoch=epoch, kind="train")


def test_a_run_that_was_killed_in_mid_epoch_goes_on_with_what_it_has_not_had(place: Place, trained: Any) -> None:
    processes, job, first, resumed = trained
    steps = steps_of_epoch(processes)
    for case in CASES[processes]:
        if case.startswith(("timed", "stateful", "iterable")):
            for epoch in range(3):
                check_exact(place, f"{job}-{case}", epoch, trained_with(first, resumed, case, epoch, steps * 3 // 2))


def test_after_a_checkpoint_of_an_epochs_end_the_next_one_is_served_to_any_loader(place: Place, trained: Any) -> None:
    processes, job, first, resumed = trained
    steps = steps_of_epoch(processes)
    for case in CASES[processes]:
        if case.startswith(("validated", "last")):
            for epoch in range(3):
                check_exact(place, f"{job}-{case}", epoch, trained_with(first, resumed, case, epoch, steps * 2))


def test_in_mid_epoch_a_loader_without_a_state_is_refused(trained: Any) -> None:
    processes, _, _, resumed = trained
    errors = [line for line in resumed.lines if line["kind"] == "error"]
    plain = [case for case in CASES[processes] if case.startswith("plain")]
    assert sorted(line["case"] for line in errors) == sorted(plain * processes)
    assert all("InvalidInput: Lightning goes on after " in line["error"] for line in errors)
    assert all("refill.timed(loader, dataset)" in line["error"] for line in errors)


def test_limited_epochs_begin_anew_and_validation_is_in_order_and_whole(place: Place, trained: Any) -> None:
    processes, job, first, _ = trained
    for epoch in range(3):
        ids = ids_of(first.lines, case="limited", epoch=epoch, kind="train")
        assert len(ids) == len(set(ids)) == steps_of_epoch(processes) // 2 * 8 * processes
        validated = ids_of(first.lines, case="limited", epoch=epoch, kind="validation")
        check_exact(place, f"{job}-limited-validation", epoch, validated)
        for rank in range(processes):
            own = ids_of(first.lines, case="limited", epoch=epoch, kind="validation", rank=rank)
            assert own == list(range(rank, NUM_SAMPLES, processes))
    assert len(ids_of(first.lines, case="limited", kind="sanity")) == 2 * 8 * processes
