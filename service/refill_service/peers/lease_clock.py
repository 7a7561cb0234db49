"""By which clock does a pod know how long ago another one has confirmed it?

By one that goes on while the machine is suspended: a pod that wakes must not take a confirmation of yesterday for one
of this second. ``time.monotonic`` stands still meanwhile on Linux. Other systems have no second clock.
"""

from __future__ import annotations

import time

__all__ = ["lease_time"]


_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def lease_time() -> float:
    """Seconds; never goes back."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)
