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

__all__ = ["Claim", "memory_shares"]

_STEPS = 60


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
    of_teams = [
        Claim(
            team,
            sum(claim.least_bytes for claim in claims if claim.team == team),
            sum(claim.most_bytes for claim in claims if claim.team == team),
            held.get(team, 0),
        )
        for team in teams
    ]
    left = max(0, total_bytes - kept)
    parts = dict(zip(teams, _filled(left, of_teams), strict=True))
    shares = [0] * len(claims)
    for team in teams:
        places = [place for place, claim in enumerate(claims) if claim.team == team]
        for place, share in zip(places, _filled(parts[team], [claims[p] for p in places]), strict=True):
            shares[place] = share
    return shares


def _filled(total_bytes: int, claims: Sequence[Claim]) -> list[int]:
    """As much for each as for any other; who needs more to shuffle well gets that."""
    least = [min(claim.least_bytes, claim.most_bytes) for claim in claims]
    if sum(least) >= total_bytes:
        if not sum(least):
            return least
        return [int(each * total_bytes / sum(least)) for each in least]
    low, high = 0.0, float(max(total_bytes, 1) + max((claim.beside_bytes for claim in claims), default=0))
    for _ in range(_STEPS):
        level = (low + high) / 2
        if sum(_at(level, claim, floor) for claim, floor in zip(claims, least, strict=True)) <= total_bytes:
            low = level
        else:
            high = level
    return [_at(low, claim, floor) for claim, floor in zip(claims, least, strict=True)]


def _at(level: float, claim: Claim, least: int) -> int:
    return min(claim.most_bytes, max(least, int(level) - claim.beside_bytes))
