"""How slowly may the other side move bytes, in its turn? With progress all the time, and in a time that has an end."""

from __future__ import annotations

__all__ = ["LEAST_BYTES", "LEAST_BYTES_PER_SECOND", "Pace"]

LEAST_BYTES = 1 << 16
"""To be moved, or all that is left, within the timeout: a byte now and then is no progress."""
LEAST_BYTES_PER_SECOND = 256 << 10
"""Over all, beside the timeout: what is held for the other side is not held for hours."""


class Pace:
    """Says by when bytes of one request or answer have to move, from ``now`` on."""

    def __init__(self, timeout_seconds: float, now: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._started = self._progress = now
        self._progress_bytes = 0
        self.moved_bytes = 0

    def moved(self, more_bytes: int, now: float) -> None:
        self.moved_bytes += more_bytes
        if self.moved_bytes - self._progress_bytes >= LEAST_BYTES:
            self._progress, self._progress_bytes = now, self.moved_bytes

    @property
    def ends(self) -> float:
        """When its time is used up, if nothing more is moved."""
        in_all = self._started + self._timeout_seconds + self.moved_bytes / LEAST_BYTES_PER_SECOND
        return min(in_all, self._progress + self._timeout_seconds)
