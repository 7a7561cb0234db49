"""Do the examples run as their first lines say, on the digits that examples/README.md packs?"""

from __future__ import annotations

import asyncio
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trainers.launching import Launched, Place
from tests.waiting import until

from refill_service.datasets.pack import pack
from refill_service.demo.digits import write_digits
from refill_service.demo.local_cluster import LocalCluster

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_DIGITS = 1500
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Pods of their own: those of the trainers serve one dataset."""
    folder = tmp_path_factory.mktemp("digits")
    store = folder / "store"
    store.mkdir()
    train, _ = write_digits(folder)
    asyncio.run(pack(str(train), store.as_uri(), blob_bytes=100_000))
    with LocalCluster(2, folder, {"memory_bytes": "64MiB", "wait_seconds": 1}) as cluster:
        yield Place(cluster, store.as_uri(), folder)


def run(place: Place, name: str, *arguments: object, processes: int = 2, max_restarts: int = 0) -> Launched:
    return place.launch(
        EXAMPLES / name, *arguments, processes=processes, max_restarts=max_restarts, seconds=500
    ).checked()


@pytest.mark.variant
def test_torchrun_ddp_goes_on_after_a_crash(digits: Place, tmp_path: Path) -> None:
    job = digits.new_job()
    options = ["--checkpoint", tmp_path / "checkpoint.pt", "--crash-at", 35]
    output = run(digits, "torchrun_ddp.py", job, *options, max_restarts=1).output
    assert output.count("goes on in epoch 1 after step 30") == 2
    for epoch in range(3):
        assert f"epoch {epoch}: {NUM_DIGITS} samples on 2 ranks" in output
        assert digits.receipt(job, epoch)["exact"]


@pytest.mark.variant
def test_lightning_goes_on_from_its_checkpoint(digits: Place, tmp_path: Path) -> None:
    job = digits.new_job()
    first = digits.launch(EXAMPLES / "lightning_example.py", job, "--max-steps", 60, processes=1, cwd=tmp_path)
    assert "after step 60" in first.checked().output  # in mid-epoch 1
    options = ["--resume", "checkpoints/last.ckpt"]
    second = digits.launch(EXAMPLES / "lightning_example.py", job, *options, processes=1, cwd=tmp_path).checked()
    found = re.search(r"after step (\d+): accuracy (\S+)", second.output)
    assert found is not None
    assert int(found[1]) == 3 * 47
    assert float(found[2]) > 0.7
    for epoch in range(3):
        assert digits.receipt(job, epoch)["exact"]
        assert digits.receipt(f"{job}-validation", epoch)["exact"]


@pytest.mark.variant
def test_batches_are_decoded_from_views_of_what_came(digits: Place) -> None:
    job = digits.new_job()
    output = run(digits, "decode_batches.py", job).output
    for epoch in range(2):
        assert f"epoch {epoch}: {NUM_DIGITS} pictures of {NUM_DIGITS * 3 * 8 * 8} values, decoded on the CPU" in output
        until(lambda epoch=epoch: bool(digits.receipt(job, epoch)["exact"]), "an exact receipt")  # type: ignore[misc]


@pytest.mark.variant
def test_grain_goes_on_from_its_state(digits: Place, tmp_path: Path) -> None:
    pytest.importorskip("grain", reason="Grain is not installed")
    job, counts = digits.new_job(), []
    for _ in range(2):
        output = run(digits, "grain_example.py", job, tmp_path / "grain.json", processes=1).output
        found = re.search(r"(\d+) of 3000 samples; (\d+) different", output)
        assert found is not None
        counts.append((int(found[1]), int(found[2])))
    assert counts == [(750, 750), (2250, NUM_DIGITS)]
    until(lambda: bool(digits.receipt(job, 1)["exact"]), "an exact receipt")
    assert digits.receipt(job, 0)["exact"]


@pytest.mark.variant
def test_a_stream_of_huggingface_goes_on(digits: Place) -> None:
    job = digits.new_job()
    output = run(digits, "huggingface_stream.py", job, processes=1).output
    assert f"{NUM_DIGITS} samples, {NUM_DIGITS} different" in output
    until(lambda: bool(digits.receipt(job, 0)["exact"]), "an exact receipt")


@pytest.mark.variant
def test_a_validation_set_comes_in_order(digits: Place) -> None:
    output = run(digits, "validation_in_order.py", digits.new_job()).output
    for number in range(2):
        assert f"run {number}: {NUM_DIGITS} samples in order, each once, and 0 of padding" in output


@pytest.mark.variant
def test_classes_come_as_often_as_each_other(digits: Place) -> None:
    output = run(digits, "class_weights.py", digits.new_job()).output
    counts = re.findall(r"of (\d+) samples, by class: \[(.*)\]", output)
    assert len(counts) == 2
    for total, by_class in counts:
        assert int(total) == NUM_DIGITS
        assert all(100 < int(count) < 200 for count in by_class.split(","))


@pytest.mark.variant
def test_a_dataset_is_split_by_ids(digits: Place) -> None:
    output = run(digits, "train_validation_split.py", digits.new_job()).output
    for epoch in range(2):
        assert f"training, epoch {epoch}: {NUM_DIGITS * 9 // 10} samples, each once" in output
        assert f"validation, epoch {epoch}: {NUM_DIGITS // 10} samples, each once" in output


@pytest.mark.parametrize(
    "name", ["torchrun_ddp.py", "validation_in_order.py", "class_weights.py", "train_validation_split.py"]
)
def test_started_without_torchrun_they_say_how(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ended in a traceback of torch's."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", [name, "http://refill:8000", "s3://bucket/digits", "run-1"])
    with pytest.raises(SystemExit, match=f"start this by torchrun: torchrun .* examples/{name} URL DATASET JOB"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
