"""Which positions of an epoch has a rank left out? Who asks for a part of its trace only is being divided twice.

What a rank asks of an epoch is a prefix of its trace, or all of it. Loader workers ask out of order, and a loop that is
broken off leaves the batches that were in flight: so a gap counts when enough was asked for above it.
"""

from __future__ import annotations

from refill.protocol.wire_format import Int64Array
from refill_service.cache_core.remote_memory import StartedPositions

__all__ = ["asked_for", "skipped_for_good"]

_IN_FLIGHT_BATCHES = 64
"""More than the batches that loaders have in flight for one rank (8 workers with 8 batches each)."""


def asked_for(started: StartedPositions | None, received: Int64Array) -> StartedPositions:
    """All positions that a rank has asked for, as far as its home knows.

    :param started: what it has asked this pod for since the pod was started.
    :param received: ``(n,)`` positions of which the rank has told that it received them.
    """
    found = StartedPositions()
    found.started(received)
    if started is not None:
        found.join(started)
    return found


def skipped_for_good(asked: StartedPositions, largest_batch: int) -> tuple[int, int] | None:
    """The first ``(start, end)`` that was left out of an epoch which the rank has left; None: nothing was, for sure.

    What lies before the first position is not judged: another pod may have been the home then.
    """
    in_flight = _IN_FLIGHT_BATCHES * largest_batch
    return next((gap for gap in asked.gaps() if gap[1] + in_flight <= asked.end), None)
