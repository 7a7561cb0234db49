"""Is what loops have had of an epoch what its plan says? Sums of hashes beside each other, over the same positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from refill.errors import InvalidInput
from refill.protocol.receipt_digest import DigestPart, merged_parts, sample_hashes, shown_digest, sum_of_hashes
from refill_service.cache_core.record_pieces import HELD_WHOLE_SAMPLES
from refill_service.cache_core.sample_mapping import Int64Array

MOST_DIGESTED = HELD_WHOLE_SAMPLES
"""Positions of an epoch. Beyond that no pod has what the whole order follows from."""
_AT_ONCE = 1 << 18
_MOST_TURNS = 64
"""So often all positions of an epoch are looked at, as for so many dealings of it. What is said beyond that counts for
nothing: whoever says very much keeps a thread no longer."""


def planned_digest(plan_id: str, epoch: int, order: Int64Array, positions: Int64Array | None = None) -> int:
    """The sum over positions ``(n,)``, all of them by default, of what an epoch's whole order ``(N,)`` has there."""
    total, count = 0, len(order) if positions is None else len(positions)
    for first in range(0, count, _AT_ONCE):
        end = min(count, first + _AT_ONCE)
        at = np.arange(first, end) if positions is None else positions[first:end]
        total += sum_of_hashes(sample_hashes(plan_id, epoch, at, order[at]))
    return total


def epoch_digest(
    parts: Iterable[DigestPart],
    num_positions: int,
    plan_id: str,
    epoch: int,
    order: Int64Array | None,
    whole_digest: int | None = None,
) -> dict[str, Any]:
    """What a receipt says of what loops have had: ``digest`` over ``digested`` positions, each once; ``digest_planned``
    over the same ones, None where nobody can say it; and whether the two are equal, and no two parts say different
    things of the same positions.

    :param parts: as pods were told them; some may be told by several.
    :param order: the whole order of the epoch; None: it is not known any more.
    :param whole_digest: that of all of its positions, where it was kept.
    """
    had = np.zeros(num_positions, dtype=bool)
    digest = looked_at = 0
    parts = list(parts)
    kept = merged_parts(parts)
    contradict = len({(part.dealt, part.spans) for part in kept}) < len(kept)
    # What other ranks had before a checkpoint comes after those that went on from there. Its state has the
    # smaller part of what they had beyond it, too.
    for part in sorted(set(parts), key=lambda part: (-part.start, -part.num_places, *part)):
        looked_at += part.num_places
        if looked_at > _MOST_TURNS * num_positions:
            continue
        positions = _positions(part, num_positions)
        if positions is not None and not had[positions].any():
            had[positions] = True
            digest += part.digest
    digested = int(had.sum())
    planned = whole_digest if digested == num_positions else None
    if order is not None:
        planned = planned_digest(plan_id, epoch, order, np.flatnonzero(had))
    found = shown_digest(digest)
    expected = None if planned is None else shown_digest(planned)
    return {
        "digest": found,
        "digested": digested,
        "digest_planned": expected,
        "digest_as_planned": None if expected is None else found == expected and not contradict,
    }


def _positions(part: DigestPart, num_positions: int) -> Int64Array | None:
    """Of a part, without repeats. None: there is no such part of an epoch of this length."""
    try:
        dealing = part.dealing(num_positions)
    except InvalidInput:
        return None
    if not part.spans or part.spans[-1][1] > dealing.per_rank:
        return None
    places = np.concatenate([np.arange(first, end) for first, end in part.spans])
    positions = dealing.positions(part.rank, places)
    return positions[positions < num_positions]
