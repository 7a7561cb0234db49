"""How much memory has a pod had at most, of what its cgroup allows? With page cache, as the kernel counts it."""

from __future__ import annotations

from typing import NamedTuple

from tests.cluster.cluster import Cluster

__all__ = ["Memory", "memory_of"]

_SCRIPT = """
import pathlib
root = pathlib.Path("/sys/fs/cgroup")
old = "memory/memory."
for peak, limit in (("memory.peak", "memory.max"), (old + "max_usage_in_bytes", old + "limit_in_bytes")):
    if (root / peak).exists():
        print((root / peak).read_text().strip(), (root / limit).read_text().strip())
        break
"""


class Memory(NamedTuple):
    peak_bytes: int
    limit_bytes: int


def memory_of(cluster: Cluster, pod: str) -> Memory | None:
    """None: the kernel does not tell its peak (cgroup v2 before Linux 5.19), or the pod does not run."""
    told = cluster.kubectl("exec", pod, "--", "python", "-c", _SCRIPT, check=False).split()
    return Memory(*map(int, told)) if len(told) == 2 and all(word.isdigit() for word in told) else None
