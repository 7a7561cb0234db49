"""How much memory do pods have, of what their cgroups allow? With page cache, as the kernel counts it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from tests.cluster.cluster import Cluster, Failed

__all__ = ["Looked", "Memory", "MemoryWatch", "memory_of"]

_EVERY_SECONDS = 15
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

    @property
    def most_bytes(self) -> int:
        return max(self.now_bytes, self.peak_bytes)

    def __str__(self) -> str:
        return f"{self.most_bytes / 1e6:.0f} of {self.limit_bytes / 1e6:.0f} MB"


class Looked(NamedTuple):
    at: float
    """By this machine's clock."""
    pod: str
    life: str
    """Another one for each pod of that name."""
    memory: Memory


class MemoryWatch:
    """Looks at the pods of the release, and at some others, now and then, in a thread of its own.

    :param others: names of pods that live as long as this does.
    """

    def __init__(self, cluster: Cluster, others: Sequence[str]) -> None:
        self._cluster, self._others = cluster, others
        self.looked: list[Looked] = []
        self._enough = threading.Event()
        self._looking = threading.Thread(target=self._look_again, daemon=True)
        self._looking.start()

    def look(self) -> None:
        """Now, too: before pods go, since what their cgroups counted goes with them, and when others have come."""
        try:
            lives = {name: pod["metadata"]["uid"] for name, pod in self._cluster.pods().items()}
        except (Failed, ValueError):
            return  # no API server just now, or half of its answer
        for pod, life in [*lives.items(), *((other, other) for other in self._others)]:
            if memory := memory_of(self._cluster, pod):
                self.looked.append(Looked(time.time(), pod, life, memory))

    def highest_since(self, since: float) -> dict[str, Memory]:
        """Of each pod of the release that was looked at since then: the most that a cgroup of that name has counted."""
        highest: dict[str, Memory] = {}
        for looked in list(self.looked):
            if looked.at >= since and looked.pod not in self._others:
                known = highest.get(looked.pod)
                if known is None or looked.memory.most_bytes > known.most_bytes:
                    highest[looked.pod] = looked.memory
        return highest

    def end(self) -> None:
        self._enough.set()
        self._looking.join(timeout=60)

    def _look_again(self) -> None:
        while True:
            began = time.monotonic()
            self.look()
            if self._enough.wait(max(0.0, began + _EVERY_SECONDS - time.monotonic())):
                return


def memory_of(cluster: Cluster, pod: str) -> Memory | None:
    """None: the pod does not run, or the kernel tells nothing."""
    try:
        told = cluster.kubectl("exec", pod, "--", "sh", "-c", _SCRIPT, seconds=20).split()
    except Failed:
        return None
    if len(told) != 5 or not told[0].isdigit():
        return None
    return Memory(*(int(word) if word.isdigit() else 0 for word in (*told[:3], told[4])))
