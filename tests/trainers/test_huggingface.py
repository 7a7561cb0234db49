"""Is every sample trained with exactly once under Hugging Face's Trainer, killed and resumed by its own checkpoint?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.trainers.digits import EXAMPLES, with_digits
from tests.trainers.launching import NUM_SAMPLES, SCRIPTS, Place, check_exact, ids_of

DIES_AT = {"dies_at": 23}
KILLED: list[dict[str, Any]] = [
    {"dataloader_num_workers": 1} | DIES_AT,
    {"iterable": True} | DIES_AT,
    {"gradient_accumulation_steps": 2, "dies_at": 13},
]


@pytest.mark.timeout(600)
def test_killed_trainings_go_on_with_what_they_have_not_had(place: Place, tmp_path: Path) -> None:
    """13 batches an epoch on each of two ranks, a checkpoint every five steps of the optimizer."""
    cases = [{"job": place.new_job()} | case for case in KILLED]
    arguments = (SCRIPTS / "huggingface_jobs.py", tmp_path)
    killed = place.launch(*arguments, json.dumps(cases), processes=2, seconds=280)
    assert killed.returncode != 0
    saved_at = {case["job"]: last_checkpoint(tmp_path / case["job"]) for case in cases}
    assert list(saved_at.values()) == [20, 20, 10], "all of the second epoch"
    (tmp_path / "resumed").touch()
    own = {"job": place.new_job(), "own_sampler": True, "epochs": 1}
    resumed = place.launch(*arguments, json.dumps([*cases, own]), processes=2, seconds=280).checked()
    for job, step in saved_at.items():
        kept = [line for line in killed.lines if line["job"] == job and line["step"] < step]
        after = [line for line in resumed.lines if line["job"] == job]
        assert {line["epoch"] for line in after} == {1, 2}
        for epoch in range(3):
            check_exact(place, job, epoch, ids_of(kept, epoch=epoch) + ids_of(after, epoch=epoch))

    # Its own sampler: plain integers, each sample a read of its own.
    ids = ids_of(resumed.lines, job=own["job"])
    assert set(ids) == set(range(NUM_SAMPLES))
    assert len(ids) == 13 * 16 * 2, "Accelerate fills the last batches up"
    assert "sampler=refill.EpochSampler(dataset)" in resumed.output


def last_checkpoint(folder: Path) -> int:
    return max(int(each.name.rpartition("-")[2]) for each in folder.glob("checkpoint-*"))


@pytest.mark.timeout(400)
def test_the_example_learns_and_goes_on_where_it_was_stopped(place: Place, tmp_path: Path) -> None:
    job = place.new_job()
    options = ("--epochs", 2, "--save-steps", 20)
    arguments = (EXAMPLES / "huggingface_example.py", job, *options)
    digits = with_digits(place)
    stopped = digits.launch(*arguments, "--stop-after", 65, processes=1, cwd=tmp_path)
    assert "stopped after step 65" in stopped.output, stopped.output
    digits.launch(*arguments, processes=1, cwd=tmp_path).checked()
    assert (tmp_path / "output" / "checkpoint-94").exists(), "two epochs of 47 steps"
    assert all(place.receipt(job, epoch)["exact"] for epoch in range(2))
