"""Is it a number of things that somebody has given? numpy's are, too."""

from __future__ import annotations

from typing import Any

import numpy as np

from refill.errors import InvalidInput


def is_whole(given: object) -> bool:
    return isinstance(given, int | np.integer) and not isinstance(given, bool)


def check_count(name: str, given: Any) -> None:
    """Raises :class:`InvalidInput` unless it is at least one."""
    if not is_whole(given):
        raise InvalidInput(f"{name} must be a whole number, got {given!r:.100}")
    if given < 1:
        raise InvalidInput(f"{name} must be at least 1, got {given}")
