"""Which workloads of MLPerf Storage are run, how is DLIO told, and what did it say?"""

from __future__ import annotations

import datetime
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

__all__ = [
    "OBJECTS_VARIABLE",
    "WORKLOADS",
    "Epoch",
    "Workload",
    "configuration",
    "dlio_argv",
    "epochs_of",
    "run_here",
    "sample_bytes",
    "write_samples",
]

OBJECTS_VARIABLE = "DLIO_OBJECTS"
"""``bucket/prefix``: where store_reader.py finds a file's object. The store is that of the AWS_ variables."""


@dataclass(frozen=True)
class Workload:
    """Of one accelerator, as MLPerf Storage has it."""

    name: str
    format: str
    sample_bytes: int
    batch: int
    compute_seconds: float
    """Of a batch."""
    read_threads: int
    least_au: float
    """Percent."""
    resized_bytes: int
    """Of what DLIO hands to the loop for a sample."""
    ranks: int
    """Simulated accelerators, here and below as they are run here."""
    steps: int
    """Of an epoch."""
    store_mbit: float

    @property
    def num_samples(self) -> int:
        return self.ranks * self.batch * self.steps

    @property
    def bytes_per_second(self) -> float:
        """What an accelerator needs."""
        return self.batch * self.sample_bytes / self.compute_seconds


WORKLOADS = {
    each.name: each
    for each in (
        # v3 on a B200: 1,170,301 JPEGs, 8 epochs.
        Workload("retinanet", "jpeg", 322_957, 24, 0.04755, 8, 85, 322_957, 2, 180, 400),
        # v2 on an H100: 1,024 TFRecords of 1,251 samples. DLIO's loader of torch reads none: here a sample is a file.
        Workload("resnet50", "npy", 114_660, 400, 0.224, 8, 90, 150_528, 2, 16, 400),
        # v3 on a B200: 7,200 files.
        Workload("unet3d", "npz", 146_600_628, 7, 0.162, 4, 90, 2_097_152, 1, 3, 800),
    )
}


def sample_bytes(workload: Workload) -> Callable[[int], bytes]:
    """What makes the file of a sample, by its number. No two are the same, and each is of the workload's size: of the
    arrays, what is in them."""
    draws = np.random.default_rng(1)
    if workload.format == "jpeg":
        # Noise, which takes some 1.1 bytes a pixel; the rest is behind the image's end, where nothing reads it.
        side = int((workload.sample_bytes / 1.6) ** 0.5)
        written = io.BytesIO()
        Image.fromarray(draws.integers(0, 256, (side, side), dtype=np.uint8)).save(written, "jpeg")
        room = workload.sample_bytes - len(written.getvalue()) - 8
        if room < 0:
            raise ValueError(f"the image has {-room} bytes too many")
        start = written.getvalue() + bytes(room)
        return lambda number: start + number.to_bytes(8, "little")
    noise = draws.bytes(workload.sample_bytes)

    def array(number: int) -> bytes:
        values = np.frombuffer(number.to_bytes(8, "little") + noise[8:], np.uint8).reshape(-1, 1)
        out = io.BytesIO()
        if workload.format == "npz":
            np.savez(out, x=values)
        else:
            np.save(out, values)
        return out.getvalue()

    return array


def write_samples(workload: Workload, folder: Path) -> None:
    """A file for each, named as DLIO names them."""
    made = sample_bytes(workload)
    for number in range(workload.num_samples):
        (folder / f"img_{number:06}.{workload.format}").write_bytes(made(number))


def configuration(
    workload: Workload,
    folder: Path,
    *,
    epochs: int,
    compute_seconds: float,
    reader: dict[str, Any],
    options: dict[str, Any] | None = None,
) -> None:
    """Write what DLIO is told: ``folder/workload/refill.yaml``, which is JSON. It finds data in ``folder/data/train``.

    :param reader: what its reader has beside batches and workers.
    :param options: ``storage_options``.
    """
    told = {
        "model": {"name": workload.name},
        "framework": "pytorch",
        "workflow": {"generate_data": False, "train": True, "checkpoint": False},
        "dataset": {
            "data_folder": str(folder / "data"),
            "format": workload.format,
            "num_files_train": workload.num_samples,
            "num_samples_per_file": 1,
            "record_length_bytes": workload.sample_bytes,
            "record_length_bytes_resize": workload.resized_bytes,
        },
        "storage": {"storage_type": "local_fs", "storage_root": str(folder), "storage_options": options or {}},
        "reader": {
            "data_loader": "pytorch",
            "batch_size": workload.batch,
            "read_threads": workload.read_threads,
            "file_shuffle": "seed",
            "sample_shuffle": "seed",
            "pin_memory": False,
            **reader,
        },
        "train": {"epochs": epochs, "computation_time": compute_seconds},
        "output": {"folder": str(folder / "out")},
        "metric": {"au": workload.least_au / 100},
    }
    (folder / "data" / "valid").mkdir(parents=True)  # listed, too
    (folder / "workload").mkdir()
    (folder / "workload" / "refill.yaml").write_text(json.dumps(told))


def dlio_argv(folder: Path, ranks: int, python: str = sys.executable) -> list[str]:
    """Its processes are of the ``mpiexec`` that lies beside this Python."""
    mpiexec = str(Path(python).with_name("mpiexec"))
    told = [f"--config-dir={folder}", "workload=refill", f"hydra.run.dir={folder / 'out'}"]
    return [mpiexec, "-launcher", "fork", "-n", str(ranks), python, "-m", "dlio_benchmark.main", *told]


@dataclass(frozen=True)
class Epoch:
    au: float
    """Percent, by DLIO: the first step is left out."""
    began: float
    """As seconds since 1970, like the next one."""
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def epochs_of(folder: Path) -> list[Epoch]:
    """What DLIO has written of each: of all processes, and when the first one began and ended it."""
    metric = json.loads((folder / "out" / "summary.json").read_text())["metric"]
    stats = json.loads((folder / "out" / "0_per_epoch_stats.json").read_text())
    return [
        Epoch(au, *(datetime.datetime.fromisoformat(stats[str(number)][when]).timestamp() for when in ("start", "end")))
        for number, au in enumerate(metric["train_au_percentage"], 1)
    ]


def run_here(argv: Sequence[str], log: Path, seconds: float, environment: dict[str, str] | None = None) -> None:
    """On this machine, all at once. Raises SystemExit with the end of what it said, where it fails."""
    with log.open("wb") as output:
        done = subprocess.run(
            argv,
            env={**os.environ, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
        )
    if done.returncode:
        raise SystemExit(f"error: DLIO ended with {done.returncode}: {log.read_text()[-2000:]}")
