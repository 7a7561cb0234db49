"""Which chunks are read together? Neighbours in one blob that are wanted at the same time, by one ranged GET."""

from __future__ import annotations

from collections.abc import Callable

from refill_service.cache_core.refill import Refill

__all__ = ["coalesced"]


def coalesced(
    refills: list[Refill],
    neighbours: Callable[[int, int], bool],
    size_bytes: Callable[[int], int],
    limit_bytes: int,
) -> list[list[Refill]]:
    """The refills in groups, each of ascending neighbours; a group comes where the first ordered of it came.

    :param neighbours: whether the second chunk follows the first in the same blob.
    :param limit_bytes: a group of more than one chunk is never larger.
    """
    place = {id(refill): i for i, refill in enumerate(refills)}
    groups: list[list[Refill]] = []
    room = 0
    for refill in sorted(refills, key=lambda refill: refill.chunk):
        size = size_bytes(refill.chunk)
        if groups and size <= room and neighbours(groups[-1][-1].chunk, refill.chunk):
            groups[-1].append(refill)
        else:
            groups.append([refill])
            room = limit_bytes
        room -= size
    return sorted(groups, key=lambda group: min(place[id(refill)] for refill in group))
