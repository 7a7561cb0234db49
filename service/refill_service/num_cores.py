"""How many cores may this process use? What it is bound to, and what its container may take."""

from __future__ import annotations

import math
import os
from pathlib import Path

_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def num_cores(limit: Path = _LIMIT) -> int:
    """1 at least.

    :param limit: of the container, as cgroup v2 says it: ``QUOTA PERIOD``, in microseconds, or ``max PERIOD``.
    """
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, _, period = limit.read_text().partition(" ")
        return max(1, min(here, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # none is known
        return here
