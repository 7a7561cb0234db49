"""Real DLIO, with two processes of MPI, trains through pods: each epoch is exact, and DLIO counts as many samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.dlio.workloads import Workload, configuration, dlio_argv, epochs_of, run_here, write_samples

from refill import testing

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-dlio" / "bin" / "python"
EPOCHS = 3
SECONDS = 280
LOADER = {"data_loader_classname": "refill.dlio.RefillDataLoader", "data_loader_sampler": "index"}

pytestmark = pytest.mark.skipif(
    not (ROOT / ".venv-dlio" / ".ready").exists(), reason="DLIO is not installed: make .venv-dlio/.ready"
)


def workload(form: str = "npz", ranks: int = 2, **changed: Any) -> Workload:
    told = {"batch": 2, "compute_seconds": 0.01, "read_threads": 1, "steps": 4} | changed
    return Workload("tried", form, 20_000, least_au=1, resized_bytes=10_000, ranks=ranks, store_mbit=0, **told)


def trained(folder: Path, of: Workload, pods: testing.Pods, changed: dict[str, Any], **options: Any) -> None:
    """DLIO runs.

    :param changed: of its configuration, by section.
    """
    for made in ("data/train", "files"):
        (folder / made).mkdir(parents=True)
    write_samples(of, folder / "files")
    for number in range(of.num_samples):
        (folder / "data" / "train" / f"{number}.{of.format}").touch()
    dataset = testing.packed(folder / "files", folder / "dataset")
    told = {"refill_url": pods.url, "refill_dataset": dataset, "refill_job": "tried"} | options
    configuration(of, folder, epochs=EPOCHS, compute_seconds=0.01, reader=LOADER, options=told)
    path = folder / "workload" / "refill.yaml"
    said = json.loads(path.read_text())
    for section, values in changed.items():
        said[section] |= values
    path.write_text(json.dumps(said))
    run_here(dlio_argv(folder, of.ranks, str(PYTHON)), folder / "dlio.log", SECONDS)


@pytest.mark.parametrize("form", ["npz", pytest.param("npy", marks=pytest.mark.variant), "jpeg"])
def test_epochs_of_dlio_are_exact_epochs_of_the_job(form: str, tmp_path: Path) -> None:
    of = workload(form)
    with testing.Pods(2) as pods:
        trained(tmp_path, of, pods, {}, refill_chunk_size=4)
        for epoch in range(EPOCHS):
            pods.check_exact("tried", epoch)
            assert pods.receipt("tried", epoch)["received"] == of.num_samples
    assert len(epochs_of(tmp_path)) == EPOCHS
    for rank in range(of.ranks):
        said = json.loads((tmp_path / "out" / f"{rank}_output.json").read_text())
        for epoch in range(1, EPOCHS + 1):
            assert len(said[str(epoch)]["compute"]["block1"]) == of.steps


@pytest.mark.variant
@pytest.mark.parametrize(
    ("changed", "options", "why"),
    [
        ({"dataset": {"num_files_train": 6}}, {}, "DLIO trains with 6 samples, in steps of 2, and the dataset has 8"),
        ({"train": {"total_training_steps": 2}}, {}, "total_training_steps ends an epoch before"),
        ({}, {"refill_job": ""}, "workload.storage.storage_options lacks refill_job"),
    ],
)
def test_what_could_not_be_exact_is_one_clear_line(
    changed: dict[str, Any], options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with testing.Pods(1) as pods, pytest.raises(SystemExit, match="DLIO ended with") as ended:
        trained(tmp_path, workload(ranks=1), pods, changed, **options)
    assert f"refill.errors.InvalidInput: {why}" in str(ended.value)
