"""`refill simulate --policy planned`: each byte is read once where memory holds what was planned for, however loaders
ask; and nothing is lost where it does not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from refill_service.cli import main
from refill_service.planning import planned_reads
from refill_service.planning.planned_reads import PlannedReads, PlannedRun, simulate_planned

BASE = PlannedRun(num_samples=32_768, memory_samples=3276, batch_size=64, num_shares=8, run=32)
"""2,620 samples are planned for, 41 batches."""


def epochs_of(run: PlannedRun, num_epochs: int = 3) -> list[PlannedReads]:
    """All epochs; each delivers every sample."""
    found = list(simulate_planned(run, num_epochs)[1])
    assert [each.delivered for each in found] == [run.num_samples] * num_epochs
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"chunk_size": 64},
        {"num_workers": 2},
        {"num_workers": 8},  # W x B x R / M = 0.2
        {"num_ranks": 4, "batch_size": 32, "num_workers": 4, "num_pods": 3, "memory_samples": 1092},  # 0.22
        {"num_ranks": 4, "batch_size": 16, "num_workers": 12, "chunk_size": 64},  # 0.29
        {"num_ranks": 2, "out_of_step": 0.4},
        {"plan_samples": 3000, "num_samples": 32_771},  # neither K nor batches divide it
        {"num_pods": 2, "memory_samples": 1638, "num_ranks": 4, "batch_size": 16},
        {"num_pods": 5, "memory_samples": 819},  # some have two shares, some one
    ],
    ids=str,
)
def test_each_byte_is_read_once_where_memory_holds_what_was_planned_for(changes: dict[str, Any]) -> None:
    run = replace(BASE, **changes)
    for each in epochs_of(run):
        assert each.gets == -(-run.num_samples // run.chunk_size)
        assert (each.samples_read, each.bytes_read) == (run.num_samples, 1.0)
        # Nothing is read before somebody asks for the first of each share.
        assert each.misses <= run.num_samples // 1000 + (8 * run.run if not each.epoch else 0)
        assert 0.9 * run.num_pods * run.memory_samples < each.held_peak <= run.num_pods * run.memory_samples


@pytest.mark.parametrize(
    ("changes", "most_gets", "most_bytes"),
    [
        ({"plan_samples": 3640}, 1.6, 1.06),  # memory over planned: 0.9
        ({"plan_samples": 4900}, 4.5, 1.25),  # 0.67
        # Were it read again as soon as there is room, what gave way would give way again: 5 GETs for a chunk.
        ({"num_ranks": 2, "batch_size": 32, "out_of_step": 1.0}, 4.0, 1.2),
        ({"num_workers": 51}, 2.5, 1.1),  # W x B x R / M = 1.25
        # Memory for a single chunk.
        ({"num_samples": 4096, "memory_samples": 16, "plan_samples": 409, "num_shares": 1}, 16.5, 1.5),
    ],
    ids=str,
)
def test_with_less_memory_more_is_read_and_nothing_is_lost(
    changes: dict[str, Any], most_gets: float, most_bytes: float
) -> None:
    run = replace(BASE, **changes)
    for each in epochs_of(run)[1:]:
        assert 1 < each.gets * run.chunk_size / run.num_samples <= most_gets
        assert 1 < each.bytes_read <= most_bytes
        assert each.misses
        assert each.single_reads
        assert each.held_peak <= run.memory_samples


def test_positions_that_are_repeated_are_read_alone() -> None:
    run = replace(BASE, num_ranks=5)
    for each in epochs_of(run):
        assert (each.gets, each.single_reads, each.samples_read) == (2048 + 2, 2, 32_768 + 2)


def test_the_same_run_is_the_same() -> None:
    run = replace(BASE, num_workers=40)
    assert epochs_of(run, 2) == epochs_of(run, 2)
    assert epochs_of(run, 2) != epochs_of(replace(run, seed=1), 2)


@pytest.mark.parametrize(("num_workers", "num_ranks"), [(0, 1), (0, 3), (1, 2), (2, 1), (8, 3)])
def test_batches_come_as_from_torchs_loader(num_workers: int, num_ranks: int) -> None:
    run = replace(BASE, num_workers=num_workers, num_ranks=num_ranks)
    asked = list(planned_reads._in_order(200, run, 0.0, np.random.default_rng(1)))
    assert sorted(asked) == [(rank, batch) for rank in range(num_ranks) for batch in range(200)]
    for rank in range(num_ranks):
        of_rank = [batch for each, batch in asked if each == rank]
        for worker in range(num_workers):
            own = [batch for batch in of_rank if batch % num_workers == worker]
            assert own == sorted(own), "a worker goes through its batches in turn"
        # The loop waits for the batch that the slowest worker has asked for: the others have no more than two each.
        ahead = max(batch - place for place, batch in enumerate(of_rank))
        assert ahead < max(1, 2 * num_workers - 1)
        assert (of_rank == sorted(of_rank)) == (num_workers <= 1)


def test_the_last_rank_is_so_far_behind() -> None:
    run = replace(BASE, num_ranks=3)
    asked = list(planned_reads._in_order(100, run, 10.0, np.random.default_rng(1)))
    place = {each: place for place, each in enumerate(asked)}
    for batch in range(10, 90):
        together = place[0, batch], place[1, batch - 5], place[2, batch - 10]
        assert max(together) - min(together) == 2


def simulated(*arguments: object) -> list[str]:
    return ["simulate", "--policy", "planned", "--pods", "1", *map(str, arguments)]


SMALL = ("--samples", 8192, "--chunk-size", 8, "--batch", 32, "--memory-samples", 819)


def test_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--ranks", 2, "--workers", 2, "--out-of-step", 0.25, "--plan-samples", 640, "--shares", 2, "--run", 16)
    assert main(simulated(*SMALL, *more, "--epochs", 2, "--json", "--memory-samples", 1000)) == 0
    found = json.loads(capsys.readouterr().out)
    epochs = found.pop("epochs")
    assert found == {
        "policy": "planned",
        "samples": 8192,
        "memory_samples": 1000,
        "plan_samples": 640,
        "chunk_size": 8,
        "pods": 1,
        "ranks": 2,
        "batch_size": 32,
        "shares": 2,
        "run": 16,
        "workers": 2,
        "under_way": 0.2,
        "out_of_step": 0.25,
    }
    assert [each["epoch"] for each in epochs] == [0, 1]
    for each in epochs:
        assert (each["gets"], each["gets_for_64"], each["samples_read"], each["bytes_read"]) == (1024, 8.0, 8192, 1.0)
        assert (each["delivered"], each["single_reads"]) == (8192, 0)


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(simulated(*SMALL)) == 0
    head, titles, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("policy planned, samples 8192, memory samples 819, plan samples 655, chunk size 8, pods 1")
    assert " ".join(titles.split()) == "epoch GETs of 64 samples bytes read misses of one sample held at most delivered"
    assert [row.split()[:4] for row in rows] == [[str(epoch), "1,024", "8.000", "1.0000x"] for epoch in range(3)]


def test_a_tenth_is_in_memory_unless_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*simulated("--samples", 4096, "--epochs", 1, "--json"), "--pods", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["memory_samples"], found["pods"], found["ranks"], found["batch_size"]) == (204, 2, 2, 256)
    assert found["plan_samples"] == 204, "half of it at least, though batches of both ranks take 256 of 408"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--workers", "-1"), "num_workers must be at least 0, got -1"),
        (("--ranks", "0"), "--ranks must be at least 1, got 0"),
        (("--plan-samples", "0"), "--plan-samples must be at least 1, got 0"),
        (("--memory-samples", "0"), "--memory-samples must be at least 1, got 0"),
        (("--memory-samples", "63"), "memory for 63 samples holds no chunk of 64"),
        (("--samples", "0"), "num_samples must be at least 1, got 0"),
        (("--samples", "30", "--memory-samples", "30"), "chunk size 64 is larger than every blob"),
        (("--pods", "0"), "num_pods must be at least 1, got 0"),
        (("--epochs", "0"), "epochs must be at least 1, got 0"),
        (("--out-of-step", "0.1"), "out_of_step is between ranks, and there is 1"),
        (("--out-of-step", "nan", "--ranks", "2"), "out_of_step must be a number of at least 0, got nan"),
        (("--shares", "70000"), "setting shares of policy planned must be at most 65536, got 70000"),
        (("--trace", "order.txt"), "--trace does not go with --policy planned"),
        (("--clock", "clock.json"), "--clock does not go with --policy planned"),
        (("--paper",), "--paper does not go with --policy planned"),
        (("--prefetch", "on"), "--prefetch does not go with --policy planned"),
        (("--window", "0"), "--window does not go with --policy planned"),
        (("--remote-memory-samples", "10000"), "--remote-memory-samples does not go with --policy planned"),
        (("--policy", "redox", "--workers", "2"), "--workers is an option of --policy planned"),
        (("--policy", "exact", "--plan-samples", "2"), "--plan-samples is an option of --policy planned"),
        (("--policy", "redox", "--classes", "3", "--ranks", "2"), "--ranks is an option of --policy planned"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str) -> None:
    assert main(simulated(*arguments)) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1, error
