"""`refill analyze`: known answers, arithmetic that a reader can redo, and a recommendation that follows its rule."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from refill.errors import InvalidInput
from refill_service.analysis import Analysis, Store, Workload, analyze, randomization_level, recommend
from refill_service.cli import main


def workload(num_samples: int = 8192, memory_share: float = 0.1, **more: object) -> Workload:
    return Workload(np.array([num_samples]), 100_000, memory_share, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "chunk_size", "gets", "read", "distance", "co_batch", "within"),
    [
        ("redox", 64, 8.9, 8.9, 0.284, 1.66, 0.05),
        # Memory is a strict bound here; with half a chunk more for each abstract chunk it is 0.084 and 5.3.
        ("drain", 64, 1, 1, 0.084, 5.3, 0.1),
        ("drain", 16, 4, 1, 0.273, 2.1, 0.05),
        ("drain", 8, 8, 1, 0.305, 1.5, 0.05),
    ],
)
def test_the_designs_table(
    policy: str, chunk_size: int, gets: float, read: float, distance: float, co_batch: float, within: float
) -> None:
    """DESIGN 4.2: 131,072 samples, memory for a tenth, interleaved groups."""
    found = analyze(workload(131_072, group_order="interleaved"), policy, chunk_size, Store())
    assert found.gets_per_sample * 64 == pytest.approx(gets, rel=0.05)
    assert found.read_amplification == pytest.approx(read, rel=0.05)
    assert found.distance == pytest.approx(distance, rel=within)
    assert found.co_batch == pytest.approx(co_batch, rel=within)


def test_randomization_level_of_the_paper() -> None:
    """DeepIO: 98.54 and 96.96 % with 7,400 samples in all, half and a quarter of them in memory."""
    assert randomization_level(7400, 0.5) == pytest.approx(0.9853, abs=5e-5)
    assert randomization_level(7400, 0.25) == pytest.approx(0.9694, abs=5e-5)
    assert randomization_level(7400, 1) == 1
    levels = [randomization_level(7400, share) for share in (1 / 100, 1 / 10, 1 / 3, 1 / 2)]
    assert levels == sorted(levels), "more memory shuffles better"


def test_memory_for_everything_is_a_uniform_shuffle() -> None:
    found = analyze(workload(8192, 1.0), "drain", 8, Store())
    assert found.read_amplification == 1
    assert found.distance == pytest.approx(1 / 3, rel=0.02)
    assert found.co_batch == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("num_pods", [1, 3])
def test_cost_and_time_by_hand(num_pods: int) -> None:
    store = Store(0.02, 100e6, 4, price_per_1000_gets=0.4, price_per_gb=0.05)
    found = analyze(workload(8192, num_pods=num_pods), "drain", 8, store)
    assert found.gets == 1024
    assert found.cost == pytest.approx(1024 / 1000 * 0.4 + 8192 * 1e5 / 1e9 * 0.05)
    # A GET takes 20 ms and 8 ms of transfer, four at a time: 7 ms each, less than the 8 ms of the bandwidth.
    assert found.epoch_seconds == pytest.approx(1024 / num_pods * 0.008)
    slow = dataclasses.replace(store, concurrency=1)
    assert analyze(workload(num_pods=num_pods), "drain", 8, slow).epoch_seconds == pytest.approx(
        1024 / num_pods * 0.028
    )
    # 256 samples for each rank: as many for each pod, in chunks of 8, after one round trip.
    assert found.first_batch_seconds == pytest.approx(0.02 + 256 / 8 * 0.008, rel=0.15)
    assert found.resident_bytes <= 0.1 * 8192 * 1e5 / num_pods


def test_a_large_dataset_is_scaled_down() -> None:
    blobs = np.full(1000, 5000)
    found = analyze(Workload(blobs, 1e5, 0.1), "drain", 8, Store(), most_samples=20_000)
    assert found.gets == pytest.approx(5_000_000 / 8)
    assert found.co_batch == pytest.approx(analyze(workload(131_072), "drain", 8, Store()).co_batch, rel=0.1)


def test_ragged_blobs_and_blobs_smaller_than_a_run() -> None:
    for blobs in ([100, 37, 1, 64, 500], [3] * 200, [1, 2]):
        found = analyze(Workload(np.array(blobs), 1e5, 0.7, batch_size=16), "drain", 2, Store())
        assert found.read_amplification == 1
        assert 0 < found.distance < 1


def row(chunk_size: int, co_batch: float, distance: float, policy: str = "drain") -> Analysis:
    return dataclasses.replace(
        Analysis(policy, chunk_size, *([0.0] * 10)), co_batch=co_batch, distance=distance, chunk_size=chunk_size
    )


def test_recommends_the_fewest_gets_that_shuffle_well() -> None:
    rows = [row(64, 1.0, 0.33, "redox"), row(4, 1.1, 0.33), row(8, 1.4, 0.31), row(16, 1.4, 0.28), row(32, 2.0, 0.31)]
    found = recommend(rows)
    assert found is not None
    assert found.chunk_size == 8


def test_recommends_the_smallest_when_none_shuffles_well() -> None:
    found = recommend([row(4, 3, 0.1), row(8, 5, 0.1)])
    assert found is not None
    assert found.chunk_size == 4
    assert "more memory" in found.reason
    assert recommend([row(64, 1.0, 0.33, "redox")]) is None


def test_json_and_table_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("f.svg", "f.png"):
        plot = tmp_path / name
        assert main(["analyze", "--samples", "8192", "--chunk-sizes", "8,64,9000", "--plot", str(plot)]) == 0
        assert plot.read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")
    table = capsys.readouterr().out
    assert "recommended: policy drain, chunk_size=8" in table
    assert "K = 9000: left out, chunk size 9000 is larger than every blob" in table
    assert main(["analyze", "--samples", "8192", "--memory", "80MB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory_share"] == pytest.approx(80e6 / (8192 * 100e3))
    assert [each["policy"] for each in found["rows"]] == ["redox"] + ["drain"] * 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs a DATASET, or --samples N"),
        (["s3://b/p", "--samples", "5"], "needs a DATASET, or --samples N"),
        (["--samples", "0"], "--samples must be at least 1"),
        (["--samples", "1000", "--memory", "lots"], "--memory: 'lots' is not a number of bytes"),
        (["--samples", "1000", "--memory", "lots%"], "write for example 10%"),
        (["--samples", "1000", "--memory", "0%"], "memory must be more than nothing"),
        (["--samples", "1000", "--memory=-3%"], "memory must be more than nothing"),
        (["--samples", "1000", "--memory", "nan%"], "memory must be more than nothing"),
        (["--samples", "1000", "--memory", "0.01%"], "holds no chunk of"),
        (["--samples", "1000", "--pods", "0"], "num_pods must be at least 1"),
        (["--samples", "1000", "--batch-size", "0"], "batch_size must be at least 1"),
        (["--samples", "1000", "--chunk-sizes", "a"], "write for example 8,16,64"),
        (["--samples", "1000", "--chunk-sizes", "0"], "--chunk-sizes must be at least 1"),
        (["--samples", "1000", "--concurrency", "0"], "--concurrency must be more than 0"),
        (["--samples", "1000", "--store-latency", "-1"], "--store-latency must not be negative"),
        (["--samples", "1000", "--plot", "x.pdf"], "must end in .png or .svg"),
        (["--samples", "1000", "--plot", "/nowhere/x.png"], "there is no folder /nowhere"),
        (["file:///nowhere"], "no dataset there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_more_pods_than_chunks() -> None:
    with pytest.raises(InvalidInput, match="holds no chunk of 64"):
        analyze(workload(1000, num_pods=64), "drain", 64, Store())
