"""Which variants does ``make test`` run? A slice of them, and after each commit the next: none goes untried."""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path

import pytest

__all__ = ["NUM_SLICES", "slice_of"]

NUM_SLICES = 64
"""So that one takes some 8 s of two cores, 15 where it has the longest ones."""
_OPTION = "--variants-slice"
_LEFT_OUT = " and not variant"
"""Of what pyproject.toml asks of tests' markers."""


def slice_of(test: str) -> int:
    """The same in every process and on every machine."""
    return zlib.crc32(test.encode()) % NUM_SLICES


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _OPTION, metavar="N", help=f"tests that are variants, too: of {NUM_SLICES} slices the Nth, or `next`"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Processes that run tests for this one are given the number."""
    if (wanted := config.getoption(_OPTION)) is not None:
        if wanted != "next" and not str(wanted).isdecimal():
            raise pytest.UsageError(f"{_OPTION} is a number, 0 to {NUM_SLICES - 1}, or next; got {wanted!r}")
        config.option.variants_slice = (_num_commits() if wanted == "next" else int(wanted)) % NUM_SLICES
        config.option.markexpr = config.option.markexpr.replace(_LEFT_OUT, "")


def pytest_sessionstart(session: pytest.Session) -> None:
    wanted, reporter = session.config.getoption(_OPTION), session.config.pluginmanager.get_plugin("terminalreporter")
    if wanted is not None and reporter is not None:
        line = (
            f"slice {wanted} of {NUM_SLICES} of the variants (again: make test VARIANTS={wanted}); all: make test-all"
        )
        reporter.write_line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        words = [word for mark in item.iter_markers("variants") for word in mark.args]
        if any(f"-{word}-" in f"-{item.callspec.id}-" for word in words):  # type: ignore[attr-defined]
            item.add_marker("variant")
    if (wanted := config.getoption(_OPTION)) is not None:
        left_out = [item for item in items if item.get_closest_marker("variant") and slice_of(item.nodeid) != wanted]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _num_commits() -> int:
    """0 where there is no git, or no history."""
    try:
        counted = subprocess.run(
            ["git", "rev-list", "--count", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
        )
    except OSError:
        return 0
    return int(counted.stdout) if counted.returncode == 0 else 0
