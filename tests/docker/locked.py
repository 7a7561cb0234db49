"""What does the project say that it needs, and which packages are locked for the image?"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

__all__ = ["PROJECT", "ROOT", "entries"]

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def entries(lock: str) -> list[tuple[Requirement, list[str]]]:
    """Each requirement of a lock file with its hashes."""
    text = re.sub(r"^\s*#.*$", "", (ROOT / "docker" / f"{lock}.lock").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [
        (Requirement(line.split(" --hash")[0]), re.findall(r"--hash=(\S+)", line)) for line in lines if line.strip()
    ]
