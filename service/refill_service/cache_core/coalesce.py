"""Which reads become one ranged GET? Those of neighbours in one blob that are wanted at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from refill_service.cache_core.policies.interface import Read

__all__ = ["coalesced"]


def coalesced(
    reads: Sequence[Read],
    neighbours: Callable[[Read, Read], bool],
    reach_bytes: Callable[[int, int], int],
    limit_bytes: int,
) -> list[list[Read]]:
    """The reads in groups, each of ascending neighbours; a group comes where the first ordered of it came.

    :param neighbours: whether the second begins where the first ends, in the same blob.
    :param reach_bytes: ``(first, end)`` -> from the first byte of these samples to the last, with what lies between.
    :param limit_bytes: a group of more than one read is never larger.
    """
    place = {id(read): i for i, read in enumerate(reads)}
    groups: list[list[Read]] = []
    for read in sorted(reads, key=lambda read: read.first):
        follows = bool(groups) and neighbours(groups[-1][-1], read)
        if follows and reach_bytes(groups[-1][0].first, read.end) <= limit_bytes:
            groups[-1].append(read)
        else:
            groups.append([read])
    return sorted(groups, key=lambda group: min(place[id(read)] for read in group))
