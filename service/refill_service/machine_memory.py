"""How much memory may this process use? What the machine has, and what its container may take."""

from __future__ import annotations

import os
from pathlib import Path

_LIMIT = Path("/sys/fs/cgroup/memory.max")


def machine_memory(limit: Path = _LIMIT) -> int:
    """Bytes.

    :param limit: of the container, as cgroup v2 says it: bytes, or ``max``.
    """
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(here, int(limit.read_text()))
    except (OSError, ValueError):  # none is known
        return here


def too_much(memory_bytes: int, here: int, num_pods: int = 1) -> str | None:
    """A warning for pods that would be killed as they fill their memory.

    :param memory_bytes: of each pod.
    :param here: bytes of the machine, or the container.
    """
    if num_pods * memory_bytes <= here:
        return None
    of_each, who = ("", "the pod") if num_pods == 1 else (f" for each of {num_pods} pods", "pods")
    return (
        f"memory_bytes is {memory_bytes / 2**30:.1f} GiB{of_each}, and this machine, or container, "
        f"has {here / 2**30:.1f} GiB: {who} would be killed while filling it. Give --memory-bytes "
        f"(REFILL_MEMORY_BYTES) less"
    )
