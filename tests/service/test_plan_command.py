"""``refill plan``: its dump and its figures, held against a plain count of the dump."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from tests.service.datasets_on_disk import image_folder

from refill_service import cli

N, K, MEMORY = 4096, 16, 400
ARGUMENTS = ["plan", "--samples", str(N), "--chunk-size", str(K), "--memory-samples", str(MEMORY), "--epoch", "3"]


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], Path]:
    path = tmp_path_factory.mktemp("plan") / "order.txt"
    assert cli.main([*ARGUMENTS, "--shares", "3", "--run", "20", "--dump", str(path)]) == 0
    return [int(line) for line in path.read_text().splitlines()], path


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert cli.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_dump_is_the_order_each_sample_once(dumped: tuple[list[int], Path]) -> None:
    assert sorted(dumped[0]) == list(range(N))


def test_the_same_arguments_give_the_same_dump(dumped: tuple[list[int], Path], tmp_path: Path) -> None:
    for name in ("again", "and again"):
        assert cli.main([*ARGUMENTS, "--shares", "3", "--run", "20", "--dump", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes() == dumped[1].read_bytes()
    assert cli.main([*ARGUMENTS, "--shares", "3", "--run", "20", "--seed", "1", "--dump", str(tmp_path / "other")]) == 0
    assert (tmp_path / "other").read_bytes() != dumped[1].read_bytes()


def test_figures_are_those_of_a_plain_count(
    dumped: tuple[list[int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = dumped[0]
    classes = tmp_path / "classes"
    classes.write_text("\n".join(str(sample // 512) for sample in range(N)))
    found = figures(
        capsys, *ARGUMENTS, "--shares", "3", "--run", "20", "--ranks", "4", "--batch", "32", "--classes", str(classes)
    )
    place = {sample: position for position, sample in enumerate(order)}
    for name, size in (("_mates", K), ("", 64)):
        pairs = [
            (place[one], place[other])
            for first in range(0, N, size)
            for one, other in itertools.combinations(range(first, first + size), 2)
        ]
        for batch, key in ((32, "cobatch_rank"), (128, "cobatch_step")):
            met = sum(one // batch == other // batch for one, other in pairs)
            assert found[key + name]["all"] == pytest.approx(met / (len(pairs) * (batch - 1) / (N - 1)))
        mean = np.mean([abs(one - other) for one, other in pairs])
        assert found["distance" + name]["all"] == pytest.approx(mean / N)
        begins = [abs(a - b) for one, other in pairs for a, b in ((one, other), (other, one)) if a < int(N * 0.05)]
        assert found["distance" + name]["first"] == pytest.approx(np.mean(begins) / N)
    windows = [np.array(order[first : first + 128]) // 512 for first in range(0, N, 128)]
    chi2 = [((np.bincount(window, minlength=8) - 16) ** 2 / 16).sum() for window in windows]
    assert found["class_counts"]["1"] == pytest.approx(np.mean(chi2) / 7)
    assert found["class_counts"]["64"] is None, "there is no window of 64 steps"
    assert found["gets"] == N // K
    assert found["bytes_read"] == 1
    assert found["peak_samples"] <= MEMORY
    assert found["lead_least"] >= 0


def test_a_first_epoch_begins_with_less_memory(capsys: pytest.CaptureFixture[str]) -> None:
    begins = figures(capsys, *ARGUMENTS, "--batch", "32", "--first")["cobatch_rank_mates"]["first"]
    later = figures(capsys, *ARGUMENTS, "--batch", "32")["cobatch_rank_mates"]["first"]
    assert begins > 2 * later, "chunk-mates come closer together while memory fills up"


@pytest.mark.parametrize("samples", [1, 2, 7, 100])
@pytest.mark.parametrize("memory", [1, 3, 1000])
@pytest.mark.parametrize("shares", [1, 8])
def test_tiny_datasets_have_plans(
    samples: int, memory: int, shares: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Less memory than a chunk: a chunk of each share at a time. A chunk of more than there are: all of them."""
    path = tmp_path / "order"
    found = figures(
        capsys,
        *("plan", "--samples", str(samples), "--chunk-size", "16", "--memory-samples", str(memory)),
        *("--shares", str(shares), "--dump", str(path)),
    )
    assert sorted(map(int, path.read_text().split())) == list(range(samples))
    assert found["gets"] == -(-samples // 16)
    assert found["peak_samples"] <= max(memory, 16 * shares)


def test_a_dataset_of_several_blobs_and_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image_folder(tmp_path / "images")
    assert cli.main(["pack", str(tmp_path / "images"), str(tmp_path / "set"), "--blob-size", "20kB"]) == 0
    capsys.readouterr()
    found = figures(capsys, "plan", "--dataset", str(tmp_path / "set"), "--chunk-size", "4", "--memory-samples", "20")
    assert found["bytes_read"] == 1
    assert len(found["settings"]["dataset"]) == 16, "the fingerprint, not the URL"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--samples", "0"], "argument --samples: must be at least 1, got 0"),
        ([], "give --samples N or --dataset URL, one of them; see refill plan --help"),
        (["--samples", "9", "--batch", "0"], "argument --batch: must be at least 1, got 0"),
        (["--samples", "9", "--chunk-size", "0"], "argument --chunk-size: must be at least 1, got 0"),
        (["--samples", "9", "--shares", "0"], "argument --shares: must be at least 1, got 0"),
        (["--samples", "9", "--memory-bytes", "0"], "argument --memory-bytes: must be at least 1, got 0"),
        (["--samples", "9", "--memory-samples", "0"], "argument --memory-samples: must be at least 1, got 0"),
        (["--samples", "9", "--classes", "/nowhere"], "--classes must be a file with a number in each line"),
        (["--samples", "9", "--dump", "/nowhere/order"], "--dump: [Errno 2] No such file or directory"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"refill: {said}")
