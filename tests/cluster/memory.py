"""How much memory does a pod have, of what its cgroup allows? With page cache, as the kernel counts it."""

from __future__ import annotations

from typing import NamedTuple

from tests.cluster.cluster import Cluster, Failed

__all__ = ["Memory", "memory_of"]

_SCRIPT = """
cd /sys/fs/cgroup
if [ -e memory.max ]; then
  cat memory.current
  cat memory.peak || echo 0
  cat memory.max
  grep '^anon ' memory.stat
else
  cd memory
  cat memory.usage_in_bytes memory.max_usage_in_bytes memory.limit_in_bytes
  grep '^total_rss ' memory.stat
fi
"""


class Memory(NamedTuple):
    now_bytes: int
    peak_bytes: int
    """0: the kernel does not tell (cgroup v2 before Linux 5.19)."""
    limit_bytes: int
    """0: none."""
    anonymous_bytes: int
    """Of ``now_bytes``, what is no page cache."""


def memory_of(cluster: Cluster, pod: str) -> Memory | None:
    """None: the pod does not run, or the kernel tells nothing."""
    try:
        told = cluster.kubectl("exec", pod, "--", "sh", "-c", _SCRIPT, seconds=20).split()
    except Failed:
        return None
    if len(told) != 5 or not told[0].isdigit():
        return None
    return Memory(*(int(word) if word.isdigit() else 0 for word in (*told[:3], told[4])))
