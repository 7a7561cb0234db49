"""On what machine was this measured? For the head of every benchmark's table."""

from __future__ import annotations

import os
import platform
from pathlib import Path

__all__ = ["machine"]


def machine() -> str:
    """Processor, cores and Python."""
    name = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"
