"""Is every sample trained with exactly once under Hugging Face's Trainer, killed and resumed by its own checkpoint?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.trainers.digits import EXAMPLES, NUM_DIGITS, with_digits
from tests.trainers.launching import (
    NUM_SAMPLES,
    SCRIPTS,
    Place,
    check_exact,
    ids_of,
    in_every_number_of_processes,
)

DIES_AT = {1: (43, 22), 2: (23, 13), 4: (13, 7)}
"""By processes, the step in the second epoch at which a job dies, without and with gradient accumulation."""
SAVED_AT = {1: (40, 20), 2: (20, 10), 4: (10, 5)}


def killed_cases(processes: int) -> list[dict[str, Any]]:
    dies_at, accumulated_dies_at = DIES_AT[processes]
    return [
        {"dataloader_num_workers": 1, "dies_at": dies_at},
        {"iterable": True, "dies_at": dies_at},
        {"gradient_accumulation_steps": 2, "dies_at": accumulated_dies_at},
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", in_every_number_of_processes(2))
def test_killed_trainings_go_on_with_what_they_have_not_had(place: Place, tmp_path: Path, processes: int) -> None:
    """A checkpoint every five steps of the optimizer."""
    cases = [{"job": place.new_job()} | case for case in killed_cases(processes)]
    arguments = (SCRIPTS / "huggingface_jobs.py", tmp_path)
    killed = place.launch(*arguments, json.dumps(cases), processes=processes, seconds=280).killed()
    saved_at = {case["job"]: last_checkpoint(tmp_path / case["job"]) for case in cases}
    plain, accumulated = SAVED_AT[processes]
    assert list(saved_at.values()) == [plain, plain, accumulated], "all of the second epoch"
    (tmp_path / "resumed").touch()
    own = {"job": place.new_job(), "own_sampler": True, "epochs": 1}
    resumed = place.launch(*arguments, json.dumps([*cases, own]), processes=processes, seconds=280).checked()
    for job, step in saved_at.items():
        kept = [line for line in killed.lines if line["job"] == job and line["step"] < step]
        after = [line for line in resumed.lines if line["job"] == job and not line["evaluates"]]
        assert {line["epoch"] for line in after} == {1, 2}
        for epoch in range(3):
            check_exact(place, job, epoch, ids_of(kept, epoch=epoch) + ids_of(after, epoch=epoch))

    # Its own sampler: plain integers, each sample a read of its own.
    filled_up = -(-NUM_SAMPLES // (16 * processes)) * 16 * processes if processes > 1 else NUM_SAMPLES
    ids = ids_of(resumed.lines, job=own["job"], evaluates=False)
    assert set(ids) == set(range(NUM_SAMPLES))
    assert len(ids) == filled_up, "Accelerate fills the last batches up"
    assert "sampler=refill.EpochSampler(dataset)" in resumed.output

    # And so is what it evaluates with: all of it, in order but for what fills the last batches up.
    batches = [list(range(start, start + 8)) for start in range(0, NUM_SAMPLES, 8)]
    for rank in range(processes):
        evaluated = ids_of(resumed.lines, job=own["job"], evaluates=True, rank=rank)
        in_order = [sample for batch in batches[rank::processes] for sample in batch]
        assert evaluated[: len(in_order)] == in_order
    assert set(ids_of(resumed.lines, job=own["job"], evaluates=True)) == set(range(NUM_SAMPLES))


def last_checkpoint(folder: Path) -> int:
    return max(int(each.name.rpartition("-")[2]) for each in folder.glob("checkpoint-*"))


@pytest.mark.variant
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
    first, second = (place.receipt(job, epoch) for epoch in range(2))
    assert first["exact"]
    # What came less than three seconds before it was stopped, the worker may not have reported: docs/CORRECTNESS.md.
    had = (60 - 47) * 32
    assert second["received"] + second["unconfirmed"] == NUM_DIGITS
    assert (second["unconfirmed"] <= had, second["repeats"], second["damaged"]) == (True, 0, 0)


@pytest.mark.variant
@pytest.mark.timeout(400)
def test_a_generator_that_one_of_several_workers_runs_is_an_error(place: Place, tmp_path: Path) -> None:
    """What ``datasets`` makes of a generator has one shard. With one worker that one has everything."""
    pytest.importorskip("datasets")
    (tmp_path / "resumed").touch()
    arguments = (SCRIPTS / "huggingface_jobs.py", tmp_path)
    exact = {"job": place.new_job(), "generator": True, "epochs": 2, "dataloader_num_workers": 1}
    trained = place.launch(*arguments, json.dumps([exact]), processes=1).checked()
    for epoch in range(2):
        ids = ids_of(line for line in trained.lines if line["step"] // (NUM_SAMPLES // 16) == epoch)
        check_exact(place, exact["job"], epoch, ids)
    lossy = exact | {"job": place.new_job(), "epochs": 1, "dataloader_num_workers": 2}
    failed = place.launch(*arguments, json.dumps([lossy]), processes=1)
    assert failed.returncode == 1
    assert f"SamplesSkipped: rank 0 of job {lossy['job']}" in failed.output
