"""What does a user read whose command was wrong?"""

from __future__ import annotations

import os

from tests.forked_processes import run_refill

__all__ = ["refill_says"]


def refill_says(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """The one line that the command ends with; nothing else is printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("REFILL_", "AWS_"))}
    environment = clean | {"AWS_EC2_METADATA_DISABLED": "true"} | (environment or {})
    done = run_refill(list(arguments), environment)
    lines = done.stderr.splitlines()
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 2, f"status {done.returncode}: {done.stdout}{done.stderr}"
    assert len(lines) == 1, f"{len(lines)} lines in place of one:\n{done.stderr}"
    assert lines[0].startswith("refill: "), lines[0]
    assert done.stdout == ""
    return lines[0]
