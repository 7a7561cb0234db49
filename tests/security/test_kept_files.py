"""Somebody has written to the volume of a pinned tier: what is no file of its own is put aside, and the pod starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ordered_cluster import OrderedCluster
from tests.pod_fixtures import rank_of

from refill_service.settings import load_settings

Packed = tuple[str, dict[str, bytes]]
MEMORY_BYTES = 8 << 20
PRECIOUS = b"somebody else's"


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 36)


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "zeros for ever": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: path.symlink_to(path.parent / "precious"),
    "link to nothing": lambda path: path.symlink_to(path.parent / "made-by-the-pod"),
    "folder": lambda path: path.mkdir(),
    "sparse": sparse,
}


@pytest.mark.variants("folder", "sparse")
@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_starts_whatever_lies_in_its_folder(tmp_path: Path, packed: Packed, kind: str) -> None:
    pinned = tmp_path / "pinned"
    settings: dict[str, Any] = {
        "memory_bytes": MEMORY_BYTES,
        "pinned_fraction": 0,
        "pinned_dir": pinned,
        "pinned_dir_bytes": "4MiB",
    }
    job = {"name": "job", "dataset": packed[0], "chunk_size": 16, "memory_bytes": 1_000_000}
    with OrderedCluster(1, tmp_path, settings) as cluster:
        rank_of(cluster, job).batch(0, np.arange(100))
        cluster.end_pod(0)
        (in_pinned,) = pinned.glob("*.pinned")
        for path in (in_pinned, pinned / "lock"):
            path.unlink()
            KINDS[kind](path)
        if kind == "link":
            (pinned / "precious").write_bytes(PRECIOUS)
        cluster.restart(0)
        other = rank_of(cluster, job | {"name": "other"})
        assert len(other.batch(0, np.arange(200)).payloads) == 200
        told = cluster.log(0)
        assert "Traceback" not in told, told[-3000:]
        if kind != "sparse":  # what is in a file is held against checksums
            assert [line for line in told.splitlines() if "is put aside as" in line and ".pinned " in line], told[
                -3000:
            ]
        assert not (pinned / "made-by-the-pod").exists()
        if kind == "link":
            assert (pinned / "precious").read_bytes() == PRECIOUS
        status = Path(f"/proc/{cluster.processes[0].pid}/status").read_text().splitlines()
        peak = int(next(line.split()[1] for line in status if line.startswith("VmHWM"))) << 10
        assert peak < load_settings(memory_bytes=MEMORY_BYTES).promised_bytes
