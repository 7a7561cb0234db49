"""How do the jobs of a pod that run now share its memory? Again whenever one comes, goes, falls asleep or wakes.

A job that says how much it wants, or whose policy can't change it, keeps what it has. Of the rest each running job gets
as much as any other, and no more than it can use; and never less than keeps its shuffle good, as long as there is so
much. A part stays free, so that the next job finds memory at once, before others have given back. Who sleeps gets
nothing, and what it holds still goes to those who want it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Claim", "memory_shares"]

_STEPS = 60


@dataclass(frozen=True)
class Claim:
    """Of one running job whose memory may change."""

    team: str
    least_bytes: int
    """What keeps its shuffle good."""
    most_bytes: int
    """What it can use."""


def memory_shares(
    total_bytes: int, claims: Sequence[Claim], one_fraction: float, reserved: Mapping[str, int] | None = None
) -> list[int]:
    """What each job may hold; all together never more than there is.

    :param total_bytes: for all of them.
    :param one_fraction: what one job alone may have; of n jobs each leaves the next one as much as it has itself where
        this is a half.
    :param reserved: by team, what is kept for it; none where there is one team. Teams share before their jobs do.
    """
    teams = sorted({claim.team for claim in claims})
    if not reserved or len(reserved) < 2:
        return _filled(_offered(total_bytes, len(claims), one_fraction), total_bytes, claims)
    kept = sum(part for team, part in reserved.items() if team not in teams)
    of_teams = [
        Claim(
            team,
            sum(claim.least_bytes for claim in claims if claim.team == team),
            sum(claim.most_bytes for claim in claims if claim.team == team),
        )
        for team in teams
    ]
    left = max(0, total_bytes - kept)
    parts = dict(zip(teams, _filled(_offered(left, len(teams), one_fraction), left, of_teams), strict=True))
    shares = [0] * len(claims)
    for team in teams:
        places = [place for place, claim in enumerate(claims) if claim.team == team]
        for place, share in zip(places, _filled(parts[team], parts[team], [claims[p] for p in places]), strict=True):
            shares[place] = share
    return shares


def _offered(total_bytes: int, count: int, one_fraction: float) -> int:
    """1/2 of it for one, 2/3 for two, 3/4 for three, where one alone may have a half."""
    return int(total_bytes * count * one_fraction / (1 + (count - 1) * one_fraction)) if count else 0


def _filled(offered_bytes: int, total_bytes: int, claims: Sequence[Claim]) -> list[int]:
    """As much for each as for any other. Who needs more to shuffle well gets that, from what stays free if need be."""
    least = [min(claim.least_bytes, claim.most_bytes) for claim in claims]
    if sum(least) >= total_bytes:
        if not sum(least):
            return least
        return [int(each * total_bytes / sum(least)) for each in least]
    low, high = 0.0, float(max(total_bytes, 1))
    for _ in range(_STEPS):
        level = (low + high) / 2
        if sum(_at(level, claim, floor) for claim, floor in zip(claims, least, strict=True)) <= offered_bytes:
            low = level
        else:
            high = level
    return [_at(low, claim, floor) for claim, floor in zip(claims, least, strict=True)]


def _at(level: float, claim: Claim, least: int) -> int:
    return min(claim.most_bytes, max(least, int(level)))
