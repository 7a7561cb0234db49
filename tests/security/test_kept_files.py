"""Somebody has written to the volumes of a pod: what is no file of its own is put aside, and everything else starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.pod_fixtures import rank_of

from refill_service.cache_core.kept_runs import RunPart
from refill_service.demo.local_cluster import LocalCluster
from refill_service.settings import load_settings

Packed = tuple[str, dict[str, bytes]]
MEMORY_BYTES = 8 << 20
PRECIOUS = b"somebody else's"


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 36)


def deep(path: Path) -> None:
    path.write_bytes(b"[" * 200_000)


def large(path: Path) -> None:
    path.write_bytes(b" " * (40 << 20))


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "zeros for ever": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: path.symlink_to(path.parent / "precious"),
    "link to nothing": lambda path: path.symlink_to(path.parent / "made-by-the-pod"),
    "folder": lambda path: path.mkdir(),
    "sparse": sparse,
    "deep": deep,
    "large": large,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_starts_whatever_lies_in_its_folders(tmp_path: Path, packed: Packed, kind: str) -> None:
    journal, pinned = tmp_path / "journal", tmp_path / "pinned"
    settings: dict[str, Any] = {
        "memory_bytes": MEMORY_BYTES,
        "pinned_fraction": 0,
        "journal_dir": journal,
        "pinned_dir": pinned,
        "pinned_dir_bytes": "4MiB",
    }
    job = {"name": "job", "dataset": packed[0], "chunk_size": 16, "memory_bytes": 1_000_000}
    intact = RunPart.of(
        {"job": "ended", "run": "run", "team": "", "pod": 0, "num_pods": 1, "ended_at": 1.0}
        | {"dataset": packed[0], "policy": "drain", "world_size": 1, "seed": 0, "owns_nothing": []},
        [{"epoch": 3}],
    )
    with LocalCluster(1, tmp_path, settings) as cluster:
        rank = rank_of(cluster, job)
        rank.batch(0, np.arange(100))
        cluster.end_pod(0)
        (in_pinned,) = pinned.glob("*.pinned")
        hostile = [in_pinned, pinned / "lock", journal / "lock", journal / "life", journal / "ended"]
        hostile += [journal / "receipts" / f"{name}.run" for name in "ab"]
        hostile += [path for path in journal.glob("job-job/*")] + [journal / "inventory-job", journal / "life.new"]
        (journal / "receipts").mkdir(exist_ok=True)
        (journal / "receipts" / "whole.run").write_bytes(intact.encode())
        for path in hostile:
            if path.exists():
                path.unlink()
            KINDS[kind](path)
            if kind == "link":
                (path.parent / "precious").write_bytes(PRECIOUS)
        cluster.restart(0)
        other = rank_of(cluster, job | {"name": "other"})
        batch = other.batch(0, np.arange(200))
        assert len(batch.payloads) == 200
        told = cluster.log(0)
        assert "Traceback" not in told, told[-3000:]
        put_aside = [line for line in told.splitlines() if "is put aside as" in line]
        assert len([line for line in put_aside if ".run " in line]) == 2, told[-3000:]
        if kind not in ("deep", "large", "sparse"):  # contents of the pinned tier are held against checksums
            assert [line for line in put_aside if ".pinned " in line], told[-3000:]
        for folder in (journal, pinned, journal / "receipts", journal / "job-job"):
            assert not (folder / "made-by-the-pod").exists()
            if kind == "link" and (folder / "precious").exists():
                assert (folder / "precious").read_bytes() == PRECIOUS
        runs = httpx.get(f"{cluster.pod_urls[0]}/v1/runs").json()
        assert [run["job"] for run in runs] == ["ended"], "what is intact beside it is read"
        status = Path(f"/proc/{cluster.processes[0].pid}/status").read_text().splitlines()
        peak = int(next(line.split()[1] for line in status if line.startswith("VmHWM"))) << 10
        assert peak < load_settings(memory_bytes=MEMORY_BYTES).promised_bytes
