"""Which chunks are read together? Neighbours in one blob that are wanted at the same time, by one ranged GET."""

from __future__ import annotations

from collections.abc import Callable

from refill_service.cache_core.refill import Refill

__all__ = ["coalesced"]


def coalesced(
    refills: list[Refill],
    neighbours: Callable[[int, int], bool],
    reach_bytes: Callable[[int, int], int],
    limit_bytes: int,
) -> list[list[Refill]]:
    """The refills in groups, each of ascending neighbours; a group comes where the first ordered of it came.

    :param neighbours: whether the second chunk follows the first in the same blob.
    :param reach_bytes: from the first byte of one chunk to the last of another, with what lies between them.
    :param limit_bytes: a group of more than one chunk is never larger.
    """
    place = {id(refill): i for i, refill in enumerate(refills)}
    groups: list[list[Refill]] = []
    for refill in sorted(refills, key=lambda refill: refill.chunk):
        follows = bool(groups) and neighbours(groups[-1][-1].chunk, refill.chunk)
        if follows and reach_bytes(groups[-1][0].chunk, refill.chunk) <= limit_bytes:
            groups[-1].append(refill)
        else:
            groups.append([refill])
    return sorted(groups, key=lambda group: min(place[id(refill)] for refill in group))
