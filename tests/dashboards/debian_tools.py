"""Where are Prometheus and promtool? Tests that need them are skipped where they can't be had."""

from __future__ import annotations

import shutil
import subprocess

import pytest

__all__ = ["succeeds", "tool"]


def tool(name: str) -> str:
    """The path of a program of Debian's package ``prometheus``."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install prometheus")
    return found


def succeeds(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
