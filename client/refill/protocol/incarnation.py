"""What is a registration of a job called? ``LINE`` when it was begun, ``LINE.2`` when it has moved to other pods twice.

Positions keep their meaning along a line: what a rank has received stays received, wherever the rest comes from.
"""

from __future__ import annotations

__all__ = ["incarnation_of", "line_of", "moves_of"]


def incarnation_of(line: str, moves: int) -> str:
    return f"{line}.{moves}" if moves else line


def line_of(incarnation: str) -> str:
    return incarnation.partition(".")[0]


def moves_of(incarnation: str) -> int:
    """How often the job had moved to other pods."""
    moves = incarnation.partition(".")[2]
    return int(moves) if moves.isdecimal() else 0
