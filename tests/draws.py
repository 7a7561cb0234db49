"""How often is a property drawn? In full by ``make test-all``; a part of that in what runs after every change."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

__all__ = ["FULL", "draws", "times"]

FULL = 100
"""Draws of a property that names no number, in full: hypothesis' own."""


def times(full: int) -> int:
    """The same part of ``full`` as other properties are drawn in this run."""
    assert settings.default is not None
    return max(1, full * settings.default.max_examples // FULL)


def draws(full: int, **more: Any) -> settings:
    """In place of ``settings(max_examples=full)``, which no profile would change."""
    return settings(max_examples=times(full), **more)
