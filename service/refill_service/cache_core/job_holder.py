"""Whose is a job? It belongs to the holder of the token that it was registered with."""

from __future__ import annotations

from refill.errors import NotAllowed

__all__ = ["check_holder", "is_of", "of_another_token"]


def is_of(held_by: str, asked_by: str) -> bool:
    """Whether a job is theirs who ask. What was registered without a token is everybody's."""
    return held_by in ("", asked_by)


def check_holder(job: str, held_by: str, asked_by: str) -> None:
    """Raises :class:`NotAllowed` for a job of another token."""
    if not is_of(held_by, asked_by):
        raise of_another_token(job)


def of_another_token(job: str) -> NotAllowed:
    return NotAllowed(f"job {job} belongs to another token: use another name, or the token it was registered with")
