"""How much memory may this process use? What the machine has, and what its container may take."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["machine_memory", "too_much"]

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


def too_much(memory_bytes: int, here: int) -> str | None:
    """A warning for a pod that would be killed as it fills its memory.

    :param here: bytes of the machine, or the container.
    """
    if memory_bytes <= here:
        return None
    return (
        f"memory_bytes is {memory_bytes / 2**30:.1f} GiB, and this machine, or container, has {here / 2**30:.1f} GiB: "
        f"the pod would be killed while filling it. Give --memory-bytes (REFILL_MEMORY_BYTES) less"
    )
