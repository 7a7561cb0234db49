"""How does a test put tests/s3_gate.py before the S3 server? As a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["gate"]


@contextmanager
def gate(upstream: str, *arguments: str) -> Iterator[str]:
    """Its URL, as long as it runs."""
    script = str(Path(__file__).with_name("s3_gate.py"))
    process = subprocess.Popen([sys.executable, script, upstream, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(10)
