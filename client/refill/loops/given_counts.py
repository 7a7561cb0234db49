"""Is it a number of things, at least one, that somebody has given?"""

from __future__ import annotations

import numpy as np

from refill.errors import InvalidInput


def check_count(name: str, given: object) -> None:
    """Raises :class:`InvalidInput`."""
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
        raise InvalidInput(f"{name} must be a whole number, got {given!r:.100}")
    if given < 1:
        raise InvalidInput(f"{name} must be at least 1, got {given}")
