"""Parts of the page as they were made last, so that each can be made alone: when, of which commit, on which machine?"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.papers.page import Curve, Part, Row

__all__ = ["MadePart", "about_now", "keep", "kept"]

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class MadePart:
    part: Part
    about: str
    """The day, the commit and the machine."""
    seconds: float


def about_now() -> str:
    """Of parts that are made from now on, by the code as it is now."""
    return f"{datetime.now(UTC):%Y-%m-%d}, {_commit()}, {machine()}"


def keep(folder: Path, name: str, made: MadePart) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(made)))


def kept(folder: Path, name: str) -> MadePart | None:
    """None: it was not made yet."""
    try:
        found = json.loads((folder / f"{name}.json").read_text())
    except FileNotFoundError:
        return None
    of_part = found["part"]
    rows, curves = [Row(**row) for row in of_part["rows"]], [Curve(**curve) for curve in of_part["curves"]]
    return MadePart(Part(of_part["paper"], of_part["command"], rows, curves), found["about"], found["seconds"])


def _commit() -> str:
    """That the code is of; said if it was changed since."""
    of_code = ["benchmarks", "client", "service"]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=_ROOT, capture_output=True, text=True)
    if commit.returncode:
        return "no commit"
    changes = subprocess.run(["git", "status", "--porcelain", *of_code], cwd=_ROOT, capture_output=True, text=True)
    return f"commit {commit.stdout.strip()}" + " with changes" * bool(changes.stdout)
