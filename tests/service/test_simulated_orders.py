"""`refill simulate --policy exact` reaches the answers that are known for orders that are kept, and takes any order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cache_core.portable_order import PortableRandom

from refill_service.cli import main


def simulated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["simulate", "--policy", "exact", "--json", *map(str, arguments)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def column(found: dict[str, Any], name: str) -> list[int]:
    return [epoch[name] for epoch in found["epochs"]]


def written(path: Path, *orders: np.ndarray) -> Path:
    path.write_text("\n".join(str(sample) for order in orders for sample in order.tolist()) + "\n")
    return path


@pytest.fixture(scope="session")
def three_epochs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = PortableRandom(1)
    return written(tmp_path_factory.mktemp("traces") / "three.txt", *(generator.permutation(2048) for _ in range(3)))


@pytest.mark.parametrize(
    ("chunk_size", "memory", "gets"),
    [(1, 204, [2048, 1844, 1844]), (8, 204, [767, 671, 694]), (64, 204, [215, 209, 208]), (64, 512, [125, 95, 95])],
)
def test_the_exact_answers_of_the_earliest_use(
    capsys: pytest.CaptureFixture[str], three_epochs: Path, chunk_size: int, memory: int, gets: list[int]
) -> None:
    options = ("--trace", three_epochs, "--memory-samples", memory, "--chunk-size", chunk_size, "--pods", 1)
    found = simulated(capsys, "--eviction", "earliest", *options)
    assert column(found, "gets") == column(found, "misses") == gets
    assert column(found, "samples_read") == [each * chunk_size for each in gets]
    assert column(found, "hits") == [2048 - each for each in gets]


def test_an_order_of_any_length(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = written(tmp_path / "skewed.txt", PortableRandom(5).skewed(500, 20_000))
    options = ("--samples", 500, "--trace", trace, "--pods", 1, "--chunk-size", 1, "--memory-samples", 50)
    assert column(simulated(capsys, "--eviction", "earliest", *options), "hits") == [10156]
    many = simulated(capsys, "--eviction", "lru", *options, "--epochs", 40)
    assert len(many["epochs"]) == 40
    assert sum(column(many, "hits")) == 3720, "memory outlives epochs"


@pytest.mark.parametrize(
    ("eviction", "chunk_size", "gets", "batch"),
    [("rolling", 64, 3.90, 256), ("renewal", 64, 4.00, 1), ("rolling", 1, 57.6, 256)],
)
def test_gets_of_64_samples(
    capsys: pytest.CaptureFixture[str], eviction: str, chunk_size: int, gets: float, batch: int
) -> None:
    """Known for 131,072 samples; here there are fewer, and some 3 % more."""
    num_samples = 16_384
    options = ("--samples", num_samples, "--memory-samples", num_samples // 10, "--pods", 1, "--epochs", 2)
    found = simulated(capsys, "--eviction", eviction, "--chunk-size", chunk_size, "--batch", batch, *options)
    for each in column(found, "gets")[1:]:  # a job goes on after the last one, too
        assert each / num_samples * 64 == pytest.approx(gets, rel=0.06)


def test_pods_are_one_cache_and_nodes_of_papers_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    """CoorDL: of all accesses, a node's own cache has C / n, all caches together N C / n."""
    options = ("--eviction", "never", "--samples", 6000, "--memory-samples", 600, "--pods", 3, "--epochs", 2)
    together = simulated(capsys, *options, "--caches", "shared")
    alone = simulated(capsys, *options, "--caches", "private")
    assert column(together, "hits") == [0, 1800]
    assert column(alone, "hits")[1] / 6000 == pytest.approx(0.1, abs=0.015)


@pytest.mark.parametrize(("part", "missed"), [(0.25, 0.9890), (0.5, 0.9530), (0.75, 0.8870), (3, 0.6667)])
def test_cache_only_of_three_nodes(capsys: pytest.CaptureFixture[str], part: float, missed: float) -> None:
    """DELI without its sampler: the second epoch."""
    of_node = 1500
    options = ("--samples", 3 * of_node, "--memory-samples", int(part * of_node), "--pods", 3, "--epochs", 2)
    found = simulated(capsys, "--eviction", "fifo", *options)
    assert found["caches"] == "private"
    assert column(found, "misses")[1] / (3 * of_node) == pytest.approx(missed, abs=0.012)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--memory-samples", "0"), "--memory-samples must be at least 1, got 0"),
        (("--samples", "10", "--chunk-size", "11"), "chunk size 11 is larger than every blob"),
        (("--epochs", "0"), "epochs must be at least 1, got 0"),
        (("--read-ahead", "0.7"), "setting read_ahead of policy exact must be at most 0.5, got 0.7"),
        (("--trace", "nowhere.txt"), "can't read trace nowhere.txt: No such file or directory"),
        (("--trace", "words.txt"), "trace words.txt line 2: 'one' is no sample id"),
        (("--trace", "words.txt", "--samples", "5"), "trace words.txt line 2: 'one' is no sample id"),
        (("--trace", "large.txt", "--samples", "5"), "trace large.txt line 3: sample 5; there are 0 to 4"),
        (("--trace", "large.txt", "--epochs", "2"), "trace large.txt names 3 samples; 2 epochs of 6 are 12"),
        (("--trace", "empty.txt"), "trace empty.txt names no sample"),
        (("--policy", "drain", "--epochs", "2"), "--epochs is an option of --policy exact"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("words", "1\none\n"), ("large", "1\n2\n5\n"), ("empty", "\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    assert main(["simulate", "--policy", "exact", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1, error
