"""Whose is a job? It belongs to the holder of the token that it was registered with."""

from __future__ import annotations

from refill.errors import NotAllowed

__all__ = ["check_holder"]


def check_holder(job: str, held_by: str, asked_by: str) -> None:
    """Raises :class:`NotAllowed` for a job of another token. What was registered without one is everybody's."""
    if held_by not in ("", asked_by):
        raise NotAllowed(f"job {job} belongs to another token: use another name, or the token it was registered with")
