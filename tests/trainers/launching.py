"""How does a test run a trainer as a user would? A script in 1, 2 or 4 processes on CPU, and what each of them told."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.forked_processes import RANKS, python_of, start
from tests.pod_fixtures import write_files
from tests.trainers.lines import FOLDER_VARIABLE
from tests.waiting import until

from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

__all__ = [
    "MEGATRON",
    "NUM_SAMPLES",
    "SCRIPTS",
    "Launched",
    "Place",
    "check_exact",
    "ids_of",
    "in_every_number_of_processes",
    "launched",
    "pack_numbered",
]

NUM_SAMPLES = 400
SCRIPTS = Path(__file__).parent
TRAINERS = (
    *RANKS,
    *("torch.distributed.launcher.api", "lightning.pytorch", "transformers.trainer", "accelerate"),
)
"""What takes seconds to import."""
MEGATRON = (*RANKS, "torch.distributed.launcher.api", "megatron.core.rerun_state_machine")
"""The same, of Megatron."""
TORCHRUN = ("torch.distributed.run",)
"""And nothing else: before torchrun starts any, it looks through all modules of its process, again and again."""
_SECONDS = 170


async def pack_numbered(folder: Path) -> str:
    """A dataset of samples 0 to 399, each with a ``bin`` of 10 to 400 bytes. Returns its URL."""
    source, store = folder / "files", folder / "store"
    source.mkdir()
    store.mkdir()
    write_files(source, NUM_SAMPLES, least=10, most=400)
    await pack(str(source), store.as_uri(), blob_bytes=30_000)
    return store.as_uri()


@dataclass(frozen=True)
class Launched:
    returncode: int
    lines: list[dict[str, Any]]
    """What the processes told, those of one process in their order."""
    output: str
    """Of all processes, standard output and errors."""

    def checked(self) -> Launched:
        assert self.returncode == 0, self.output[-4000:]
        return self

    def killed(self) -> Launched:
        """As they had to be, and had not failed before."""
        assert self.returncode == -signal.SIGKILL or "(SIGKILL)" in self.output, self.output[-4000:]
        return self


@dataclass(frozen=True)
class Place:
    """Pods and a dataset, for the jobs of a test."""

    cluster: LocalCluster
    dataset: str
    folder: Path

    @property
    def url(self) -> str:
        return self.cluster.pod_urls[0]

    def new_job(self) -> str:
        return f"job-{uuid.uuid4().hex[:8]}"

    def launch(
        self,
        script: Path,
        *arguments: object,
        processes: int,
        max_restarts: int = 0,
        seconds: float = _SECONDS,
        environment: dict[str, str] | None = None,
        cwd: Path | None = None,
        imported: tuple[str, ...] = TRAINERS,
    ) -> Launched:
        """``script URL DATASET ARGUMENTS...``, as :func:`launched` starts it."""
        folder = self.folder / uuid.uuid4().hex[:8]
        folder.mkdir()
        environment = {
            FOLDER_VARIABLE: str(folder),
            "CUDA_VISIBLE_DEVICES": "",
            # Else ranks that torchrun starts again meet the addresses of those before, which are gone.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        } | (environment or {})
        command = [str(script), self.url, self.dataset, *map(str, arguments)]
        returncode, output = launched(
            command,
            folder / "output.log",
            processes=processes,
            max_restarts=max_restarts,
            seconds=seconds,
            environment=environment,
            cwd=cwd or folder,
            imported=imported,
        )
        lines = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
        return Launched(returncode, lines, output)

    def receipt(self, job: str, epoch: int) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/v1/jobs/{job}/epochs/{epoch}/receipt").raise_for_status().json()
        return found


def launched(
    command: Sequence[str],
    log: Path,
    *,
    processes: int,
    cwd: Path,
    max_restarts: int = 0,
    seconds: float = _SECONDS,
    environment: dict[str, str] | None = None,
    imported: tuple[str, ...] = TRAINERS,
) -> tuple[int, str]:
    """``python COMMAND...``, under torchrun if there are several processes or restarts: how it ended, what it said.

    :param imported: what the processes have imported.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | (environment or {})
    modules = imported
    if processes > 1 or max_restarts:
        places = ["--standalone", f"--nproc-per-node={processes}", f"--max-restarts={max_restarts}"]
        command = ["-m", "torch.distributed.run", *places, "--no-python", *python_of(imported), *command]
        modules = TORCHRUN
    with log.open("wb") as output:
        process = start(modules, list(command), environment, output, cwd)
        try:
            returncode = process.wait(seconds)
        finally:
            process.kill()
    return returncode, log.read_text(errors="replace")


def in_every_number_of_processes(usual: int) -> list[Any]:
    """Parameters 1, 2 and 4; all but the usual one are for ``make test-trainers``."""
    return [
        pytest.param(number, id=f"{number} processes", marks=() if number == usual else pytest.mark.every_number)
        for number in (1, 2, 4)
    ]


def ids_of(lines: Iterable[dict[str, Any]], **wanted: object) -> list[int]:
    """The ``ids`` of all lines that have these values, such as ``epoch=0``."""
    return [i for line in lines if wanted.items() <= line.items() and "ids" in line for i in line["ids"]]


def check_exact(place: Place, job: str, epoch: int, ids: list[int]) -> None:
    """Every sample was trained with exactly once, and the pods' receipt says the same: ranks report a moment later."""
    assert len(ids) == len(set(ids)) == NUM_SAMPLES, f"{len(ids)} samples, {len(set(ids))} of {NUM_SAMPLES} distinct"
    until(lambda: place.receipt(job, epoch)["exact"], f"an exact receipt of epoch {epoch}")
