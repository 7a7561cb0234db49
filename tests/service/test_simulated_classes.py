"""`refill simulate --classes`: what an order that is planned within classes reads, and what does not go with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from refill_service.cli import main

SMALL = ("--samples", "4800", "--pods", "2", "--batch", "40", "--chunk-size", "8", "--memory-samples", "400")


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["simulate", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(("order", "gets"), [("buckets", 9), ("balanced", 8.1), ("random", 8.5), ("sorted", 35)])
def test_a_plans_samples_of_each_class_in_turn(capsys: pytest.CaptureFixture[str], order: str, gets: float) -> None:
    found = simulated(capsys, "--classes", "4", "--class-order", order, *SMALL)
    assert found["composed"] == found["batches"] == 120
    assert (found["duplicates"], found["missing"], found["misses"]) == (0, 0, 0)
    assert order == "sorted" or found["co_batch"] < 2
    assert 8 <= found["gets_for_64"] <= gets
    assert found["read_amplification"] <= 1.1 or order == "sorted"


def test_classes_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Numbers are names; one class has a single sample. Nothing divides: a sample pads the ranks."""
    path = tmp_path / "classes"
    path.write_text("\n".join(str(10**6 * (i % 3) - 7 if i else 5) for i in range(1001)))
    found = simulated(capsys, "--classes", str(path), "--pods", "3", "--batch", "64")
    assert found["composed"] == found["batches"]
    assert (found["delivered"], found["duplicates"], found["missing"]) == (1002, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--classes", "0"), "--classes must be 1 to the number of samples, 131072, got 0"),
        (("--classes", "/nowhere"), "--classes must be a number, or a file with one in each line"),
        (("--classes", "3", "--policy", "exact"), "--classes goes with --policy planned, not with exact"),
        (("--classes", "3", "--epochs", "2"), "--epochs does not go with --classes"),
        (("--classes", "3", "--window", "0"), "--window does not go with --classes"),
        (("--class-order", "sorted"), "--class-order goes with --classes"),
        (("--classes", "3", "--memory-samples", "0"), "memory_samples must be at least 1, got 0"),
        (("--classes", "3", "--pods", "0"), "num_pods must be at least 1, got 0"),
    ],
)
def test_what_does_not_go_together(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str) -> None:
    assert main(["simulate", *arguments]) != 0
    errors = capsys.readouterr().err
    assert says in errors
    assert len(errors.strip().splitlines()) == 1
