"""`refill analyze --classes`: what redirection within classes costs: of labels, of lengths, of those of a file."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refill_service.cli import main
from refill_service.datasets.pack import pack
from refill_service.planning.analysis import Analysis, DatasetShape, Row, analyze
from refill_service.planning.class_reads import ClassRun, equal_classes, simulate_classes

SHAPE = DatasetShape.uniform(4800, 1000, 4800)
SHUFFLED = equal_classes(4800, 4, seed=1)
STORED_BY_CLASS = np.repeat(np.arange(4), 1200)


def within(classes: np.ndarray, order: str, part: float = 0.1, chunk_size: int = 8) -> Row:
    shape = replace(SHAPE, classes=classes)
    analysis = Analysis(shape, int(part * shape.total_bytes), num_pods=2, batch_size=80, class_order=order)
    return analyze(analysis, "drain", chunk_size)


@pytest.mark.parametrize(
    ("classes", "order", "least_gets", "most_gets"),
    [
        (SHUFFLED, "balanced", 8, 8),
        (SHUFFLED, "buckets", 8, 8.5),
        (SHUFFLED, "sorted", 30, 64),
        (STORED_BY_CLASS, "balanced", 8, 8),
        (STORED_BY_CLASS, "sorted", 8, 8),
    ],
)
def test_what_orders_of_classes_read(classes: np.ndarray, order: str, least_gets: float, most_gets: float) -> None:
    row = within(classes, order)
    assert row.read_amplification == 1
    assert least_gets <= row.gets_per_64_samples <= most_gets


@pytest.mark.parametrize(("part", "gets"), [(0.02, 2440), (0.1, 602)])
def test_memory_counts_as_in_simulate(part: float, gets: int) -> None:
    """Both choose by keys of their own: five seeds differ by some percent."""
    run = ClassRun(int(part * 2400), chunk_size=8, num_pods=2, batch_size=40, remote_memory_samples=0, window=0, seed=1)
    assert simulate_classes(SHUFFLED, run).gets == pytest.approx(gets, rel=0.05)
    assert within(SHUFFLED, "buckets", part).gets == pytest.approx(gets, rel=0.05)


def test_other_policies_know_no_classes() -> None:
    plain = Analysis(SHAPE, 480_000, num_pods=2)
    of_classes = replace(plain, shape=replace(SHAPE, classes=SHUFFLED))
    assert analyze(of_classes, "redox", 16) == analyze(plain, "redox", 16)


def analyzed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["analyze", "--json", "--redox-chunk-sizes", "4", "--drain-chunk-sizes", "4", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_of_a_dataset(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for label, name in enumerate(("bird", "cat", "dog")):
        (tmp_path / "files" / name).mkdir(parents=True)
        for i in range(20):
            (tmp_path / "files" / name / f"{i}.txt").write_text(name * (1 + 200 * label + i))
    store = tmp_path / "store"
    asyncio.run(pack(str(tmp_path / "files"), store.as_uri(), blob_bytes=20_000))
    capsys.readouterr()
    memory = (str(store), "--chunk-memory", "60%", "--batch-size", "12", "--pods", "2")
    labels = analyzed(capsys, *memory, "--classes", "labels")
    assert (labels["classes"], labels["class_order"]) == (3, "balanced")
    lengths = analyzed(capsys, *memory, "--classes", "lengths")
    assert (lengths["classes"], lengths["class_order"]) == (3, "buckets"), "tar has blocks: there are three lengths"
    for found in (labels, lengths):
        assert [row["read_amplification"] for row in found["rows"] if row["policy"] == "drain"] == [1]
    assert analyzed(capsys, *memory)["classes"] == 0
    assert (
        main(["analyze", *memory, "--classes", "labels", "--drain-chunk-sizes", "4", "--redox-chunk-sizes", "4"]) == 0
    )
    assert "drain redirects within classes: 3, each batch with all of them" in capsys.readouterr().out


def test_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "classes"
    path.write_text("\n".join(str(7 * (i % 3) - 7) for i in range(600)))
    found = analyzed(capsys, "--samples", "600", "--classes", str(path), "--class-order", "random")
    assert (found["classes"], found["class_order"]) == (3, "random")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--classes", "labels"), "--classes labels are those of a DATASET"),
        (("--classes", "0"), "--classes must be 1 to the number of samples, 900, got 0"),
        (("--classes", "/nowhere"), "--classes must be a number, or a file with one in each line"),
        (("--class-order", "sorted"), "--class-order goes with --classes"),
        (("--classes", "3", "--simulate-samples", "500"), "simulate all of them, with --simulate-samples 900"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str) -> None:
    assert main(["analyze", "--samples", "900", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1, error
