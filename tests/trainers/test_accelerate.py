"""Is every sample trained with exactly once under Accelerate, in each of its modes, killed and resumed?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.trainers.digits import EXAMPLES, NUM_DIGITS, with_digits
from tests.trainers.launching import NUM_SAMPLES, SCRIPTS, Place, check_exact, ids_of
from torch.utils.data import DataLoader

import refill

Case = dict[str, Any]

STATEFUL = {"use_stateful_dataloader": True}
DISPATCHED = {"dispatch_batches": True}
SHARDED = {"iterable": True, "dispatch_batches": False}
EPOCHS: dict[int, list[Case]] = {
    1: [{}, {"workers": 2} | STATEFUL, {"iterable": True, "batch_size": 7, "workers": 2}],
    2: [
        {"workers": 2},
        {"split_batches": True},
        {"even_batches": False, "batch_size": 7},
        {"drop_last": True},
        {"batch_size": 256},
        {"loader_of": "batch_sampler"},
        DISPATCHED,
        DISPATCHED | {"split_batches": True, "workers": 2},
        {"iterable": True},
        {"iterable": True, "drop_last": True},
        {"iterable": True, "split_batches": True},
        SHARDED | {"workers": 2},
        SHARDED | {"split_batches": True},
        STATEFUL,
        STATEFUL | DISPATCHED | {"workers": 2},
        STATEFUL | {"iterable": True},
    ],
    4: [{}, {"iterable": True}],
}


@pytest.mark.timeout(400)
@pytest.mark.every_number
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_epochs_are_exact(place: Place, processes: int) -> None:
    cases = [{"job": place.new_job()} | case for case in EPOCHS[processes]]
    script = SCRIPTS / "accelerate_epochs.py"
    launched = place.launch(script, json.dumps(cases), processes=processes, seconds=360).checked()
    if processes == 2:
        assert "dispatch_batches=False, or use skip_first_batches in place of states" in launched.output
    for case in cases:
        for epoch in range(2):
            lines = [line for line in launched.lines if (line["job"], line["epoch"]) == (case["job"], epoch)]
            assert len(lines) == processes
            assert len({tuple(line["sizes"]) for line in lines}) == 1, "ranks go through an epoch in step"
            ids = ids_of(lines)
            if case.get("drop_last"):
                assert len(ids) == len(set(ids)) == NUM_SAMPLES - NUM_SAMPLES % (16 * processes), case
                continue
            if SHARDED.items() <= case.items() and not case.get("split_batches"):
                assert len(ids) > NUM_SAMPLES, "Accelerate fills the last batch up"
                ids = sorted(set(ids))
            else:
                assert len(lines[0]["gathered"]) == NUM_SAMPLES, "gather_for_metrics cuts nothing off, and adds nothing"
            check_exact(place, case["job"], epoch, ids)


@pytest.mark.timeout(400)
def test_batches_that_were_never_trained_with_are_not_skipped(place: Place) -> None:
    case = {"job": place.new_job(), "skip": 3, "epochs": 1}
    launched = place.launch(SCRIPTS / "accelerate_epochs.py", json.dumps([case]), processes=1)
    assert launched.returncode != 0
    (line,) = launched.lines
    assert "SamplesSkipped: rank 0" in line["error"]
    assert "left out 0 to 47" in line["error"]


@pytest.mark.parametrize("iterable", [False, True])
def test_the_loop_says_the_epoch_whatever_accelerate_has_counted(place: Place, iterable: bool) -> None:
    """Its loaders set their own count at the start of an iteration: 0 in a process that is new."""
    from accelerate.data_loader import prepare_data_loader, skip_first_batches  # slow to import

    arguments = {"dataset": place.dataset, "job": place.new_job(), "memory_bytes": 1 << 20}
    epochs: Any
    if iterable:
        dataset: Any = refill.CacheIterableDataset(place.url, batch_size=16, **arguments)
        epochs = dataset
        loader = DataLoader(dataset, batch_size=16)
    else:
        dataset = refill.CacheDataset(place.url, **arguments)
        epochs = refill.EpochSampler(dataset)
        loader = DataLoader(dataset, batch_size=16, sampler=epochs)
    prepared = prepare_data_loader(loader, num_processes=1, process_index=0)
    epochs.set_epoch(1)
    for epoch in (1, 2):  # nobody sets the second one
        ids = [i for batch in prepared for i in batch["__id__"].tolist()]
        check_exact(place, arguments["job"], epoch, ids)
    epochs.set_epoch(4)
    ids = [i for batch in skip_first_batches(prepared) for i in batch["__id__"].tolist()]
    check_exact(place, arguments["job"], 4, ids)


KILLED: dict[int, list[Case]] = {
    1: [{}, STATEFUL | {"workers": 1}, STATEFUL | {"iterable": True}],
    2: [
        {"workers": 2},
        {"split_batches": True},
        DISPATCHED,
        {"iterable": True},
        SHARDED | {"workers": 2},
        STATEFUL,
        STATEFUL | {"workers": 2},
        STATEFUL | SHARDED,
    ],
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("processes", "modes"),
    [
        pytest.param(1, KILLED[1], id="1 process", marks=pytest.mark.every_number),
        pytest.param(2, KILLED[2], id="2 processes", marks=pytest.mark.every_number),
        pytest.param(2, [{"workers": 2}, DISPATCHED, STATEFUL | SHARDED], id="some modes"),
    ],
)
def test_killed_jobs_go_on_with_what_they_have_not_had(
    place: Place, tmp_path: Path, processes: int, modes: list[Case]
) -> None:
    """From Accelerate's own checkpoint, of an earlier step: what came after it is trained with again."""
    cases = [{"job": place.new_job()} | case for case in modes]
    arguments = (SCRIPTS / "accelerate_jobs.py", tmp_path, json.dumps(cases))
    killed = place.launch(*arguments, processes=processes, seconds=280).killed()
    (tmp_path / "resumed").touch()
    resumed = place.launch(*arguments, processes=processes, seconds=280).checked()
    for case in cases:
        of_job = {"job": case["job"]}
        kept = [line for line in killed.lines if (line["epoch"], line["step"]) < (1, 4)]
        assert len(ids_of(killed.lines, **of_job)) > len(ids_of(kept, **of_job)), "it went on after its checkpoint"
        for epoch in range(3):
            before, after = ids_of(kept, epoch=epoch, **of_job), ids_of(resumed.lines, epoch=epoch, **of_job)
            assert bool(before) == (epoch <= 1), case
            assert bool(after) == (epoch >= 1), case
            ids = before + after
            if SHARDED.items() <= case.items():
                assert len(ids) == NUM_SAMPLES + 16, "Accelerate fills the last batch of each process up"
                ids = sorted(set(ids))
            check_exact(place, case["job"], epoch, ids)


@pytest.mark.variant
@pytest.mark.timeout(400)
def test_the_example_learns_and_goes_on_where_it_was_stopped(place: Place, tmp_path: Path) -> None:
    """After 30 steps, 24 an epoch: it goes on from the checkpoint after step 5 of the second one."""
    job = place.new_job()
    options = ("--epochs", 3, "--save-every", 5)
    arguments = (EXAMPLES / "accelerate_example.py", job, *options)
    digits = with_digits(place)
    stopped = digits.launch(*arguments, "--stop-after", 30, processes=2, cwd=tmp_path)
    assert "stopped in epoch 1, after step 6" in stopped.output, stopped.output
    done = digits.launch(*arguments, processes=2, cwd=tmp_path).checked()
    found = {int(e): (float(r), int(n)) for e, r, n in re.findall(r"epoch (\d): (\S+) of (\d+) right", done.output)}
    assert {epoch: seen for epoch, (_, seen) in found.items()} == {1: NUM_DIGITS - 5 * 64, 2: NUM_DIGITS}
    assert found[2][0] > 0.7
    assert all(place.receipt(job, epoch)["exact"] for epoch in range(3))


@pytest.mark.variant
@pytest.mark.timeout(300)
def test_a_part_of_a_random_split_is_exact(place: Place) -> None:
    """With ``dispatch_batches=True`` process 0 also says for the others what they would ask for."""
    launched = place.launch(SCRIPTS / "accelerate_parts.py", place.new_job(), processes=2).checked()
    for dispatched in (False, True):
        for name, size in (("train", 300), ("validation", 100)):
            for epoch in range(2):
                ids = ids_of(launched.lines, dispatched=dispatched, name=name, epoch=epoch)
                assert len(ids) == len(set(ids)) == size, (dispatched, name, epoch)
        both = ids_of(launched.lines, dispatched=dispatched, epoch=0)
        assert sorted(both) == list(range(NUM_SAMPLES))
