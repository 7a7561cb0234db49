"""How do the jobs of a pod that run now share its memory? Again whenever one comes, goes, falls asleep or wakes.

A job that says how much it wants, or whose policy can't change it, keeps what it has. Of the rest each running job gets
as much as any other, and no more than it can use; and never less than keeps its shuffle good, as long as there is so
much. One that runs alone gets all that it can use. When another one comes, those that have more than their share give
it back at once, and read again what they forget by that. Who sleeps gets nothing, and what it holds still goes to those
who want it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from refill_service.cache_core.sample_mapping import Int64Array


@dataclass(frozen=True)
class Claim:
    """Says what memory one running job can use, and how much it keeps."""

    team: str
    least_bytes: int
    """What keeps its shuffle good."""
    most_bytes: int
    """What it can use."""
    beside_bytes: int = 0
    """What its owner holds that keeps what it has: counted as if it had been given first."""


def memory_shares(
    total_bytes: int,
    claims: Sequence[Claim],
    reserved: Mapping[str, int] | None = None,
    held: Mapping[str, int] | None = None,
) -> list[int]:
    """What each job may hold; all together never more than there is.

    :param total_bytes: for all of them.
    :param reserved: by team, what is kept for it; none where there is one team. Teams share before their jobs do.
    :param held: by team, what it has in jobs that keep what they have, beside ``total_bytes``. That much of its reserve
        is in use.
    """
    held = held or {}
    teams = sorted({claim.team for claim in claims})
    if not reserved or len(reserved) < 2:
        return _filled(total_bytes, claims)
    kept = sum(max(0, part - held.get(team, 0)) for team, part in reserved.items() if team not in teams)
    places_of: dict[str, list[int]] = {team: [] for team in teams}
    for place, claim in enumerate(claims):
        places_of[claim.team].append(place)
    of_teams = [
        Claim(
            team,
            sum(claims[place].least_bytes for place in places),
            sum(claims[place].most_bytes for place in places),
            held.get(team, 0),
        )
        for team, places in places_of.items()
    ]
    left = max(0, total_bytes - kept)
    parts = dict(zip(teams, _filled(left, of_teams), strict=True))
    shares = [0] * len(claims)
    for team, places in places_of.items():
        for place, share in zip(places, _filled(parts[team], [claims[p] for p in places]), strict=True):
            shares[place] = share
    return shares


def _filled(total_bytes: int, claims: Sequence[Claim]) -> list[int]:
    """As much for each as for any other; who needs more to shuffle well gets that."""
    most = np.array([claim.most_bytes for claim in claims], dtype=np.int64)
    beside = np.array([claim.beside_bytes for claim in claims], dtype=np.int64)
    least = np.minimum(np.array([claim.least_bytes for claim in claims], dtype=np.int64), most)
    of_all = int(least.sum())
    if of_all >= total_bytes:
        return [int(each * total_bytes / of_all) if of_all else each for each in least.tolist()]

    def at(level: int) -> Int64Array:
        found: Int64Array = np.minimum(most, np.maximum(least, level - beside))
        return found

    low, high = 0, max(total_bytes, 1) + int(beside.max(initial=0))
    while low < high:  # the highest level that there is enough for
        level = (low + high + 1) // 2
        low, high = (level, high) if int(at(level).sum()) <= total_bytes else (low, level - 1)
    shares: list[int] = at(low).tolist()
    return shares
