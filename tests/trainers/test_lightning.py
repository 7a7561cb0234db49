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
)

SCRIPT = SCRIPTS / "lightning_job.py"
BATCH = 16
CASES = {
    1: ["timed-0", "stateful-2", "iterable-2", "timed-2"],
    2: ["validated-1", "last-1", "plain-0", "plain-1", "stateful-1", "timed-1"],
    4: ["validated-1", "last-1", "plain-0", "plain-1", "stateful-1", "timed-1"],
}
"""The last one is killed by SIGKILL, and those before in the same process stop."""
SOME = ["validated-1", "plain-0", "timed-1"]
"""That ``make test`` has, on two ranks."""


class Trained(NamedTuple):
    place: Place
    processes: int
    cases: list[str]
    job: str
    """Its cases are jobs of this name, and their own."""
    first: Launched
    """Was killed."""
    resumed: Launched


@pytest.mark.variant
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        pytest.param(2, SOME, id="some cases"),
        *(
            pytest.param(number, cases, id=f"{number} processes", marks=pytest.mark.every_number)
            for number, cases in CASES.items()
        ),
    ],
)
def test_a_run_that_was_killed_and_went_on(place: Place, tmp_path: Path, processes: int, cases: list[str]) -> None:
    """All cases in two launches: starting them is most of what this costs."""
    job = place.new_job()
    first, resumed = (
        place.launch(SCRIPT, job, tmp_path, phase, *cases, processes=processes, seconds=500)
        for phase in ("first", "resumed")
    )
    trained = Trained(place, processes, cases, job, first.killed(), resumed.checked())
    in_mid_epoch_it_goes_on_with_what_it_has_not_had(trained)
    after_a_checkpoint_of_an_epochs_end_the_next_one_is_served_to_any_loader(trained)
    in_mid_epoch_a_loader_without_a_state_is_refused(trained)
    limited_epochs_begin_anew_and_validation_is_in_order_and_whole(trained)


def steps_of_epoch(processes: int) -> int:
    return -(-NUM_SAMPLES // (BATCH * processes))


def trained_with(first: Launched, resumed: Launched, case: str, epoch: int, saved_at: int) -> list[int]:
    """What the model of the second run has seen: of the first run what came before the checkpoint."""
    before = [line for line in first.lines if line.get("step", 0) <= saved_at]
    return ids_of(before + resumed.lines, case=case, epoch=epoch, kind="train")


def in_mid_epoch_it_goes_on_with_what_it_has_not_had(trained: Trained) -> None:
    place, processes, cases, job, first, resumed = trained
    steps = steps_of_epoch(processes)
    for case in cases:
        if case.startswith(("timed", "stateful", "iterable")):
            for epoch in range(3):
                check_exact(place, f"{job}-{case}", epoch, trained_with(first, resumed, case, epoch, steps * 3 // 2))


def after_a_checkpoint_of_an_epochs_end_the_next_one_is_served_to_any_loader(trained: Trained) -> None:
    place, processes, cases, job, first, resumed = trained
    steps = steps_of_epoch(processes)
    for case in cases:
        if case.startswith(("validated", "last")):
            for epoch in range(3):
                check_exact(place, f"{job}-{case}", epoch, trained_with(first, resumed, case, epoch, steps * 2))


def in_mid_epoch_a_loader_without_a_state_is_refused(trained: Trained) -> None:
    _, processes, cases, _, _, resumed = trained
    errors = [line for line in resumed.lines if line["kind"] == "error"]
    plain = [case for case in cases if case.startswith("plain")]
    assert sorted(line["case"] for line in errors) == sorted(plain * processes)
    assert all("InvalidInput: Lightning goes on after " in line["error"] for line in errors)
    assert all("refill.timed(loader, dataset)" in line["error"] for line in errors)


def limited_epochs_begin_anew_and_validation_is_in_order_and_whole(trained: Trained) -> None:
    place, processes, _, job, first, _ = trained
    for epoch in range(3):
        ids = ids_of(first.lines, case="limited", epoch=epoch, kind="train")
        assert len(ids) == len(set(ids)) == steps_of_epoch(processes) // 2 * BATCH * processes
        validated = ids_of(first.lines, case="limited", epoch=epoch, kind="validation")
        check_exact(place, f"{job}-limited-validation", epoch, validated)
        for rank in range(processes):
            own = ids_of(first.lines, case="limited", epoch=epoch, kind="validation", rank=rank)
            assert own == list(range(rank, NUM_SAMPLES, processes))
    assert len(ids_of(first.lines, case="limited", kind="sanity")) == 2 * BATCH * processes


MADE_IN_THE_MAIN_SCRIPT = """
import sys
import lightning, torch
import refill

url, dataset_url, job = sys.argv[1:]
dataset = refill.CacheDataset(url, dataset=dataset_url, job=job, transform=lambda sample: torch.zeros(1))
loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=refill.EpochSampler(dataset))

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-9)

lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False).fit(Model(), loader)
"""


@pytest.mark.variant
@pytest.mark.timeout(300)
def test_a_loader_that_is_made_before_the_ranks_are_known_is_an_error_that_says_where_to_make_it(
    place: Place, tmp_path: Path
) -> None:
    """Lightning starts the main script again for the second device, when the first has made the job as rank 0."""
    script = tmp_path / "train.py"
    script.write_text(MADE_IN_THE_MAIN_SCRIPT)
    launched = place.launch(script, place.new_job(), processes=1)
    assert launched.returncode != 0
    errors = [line for line in launched.output.splitlines() if "refill.errors.RankTaken: " in line]
    assert len(errors) == 1, launched.output[-4000:]
    assert "calls itself rank 0 of job" in errors[0]
    assert errors[0].endswith(
        "make the dataset and its loader in train_dataloader of the LightningModule or LightningDataModule"
    )
