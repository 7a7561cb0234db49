"""What is a registration of a job called? ``LINE`` when it was begun, ``LINE.2`` when it has moved to other pods twice.

A line is a *run* of the job. When a run has ended and the job is begun again, the next run has a name that follows from
it, so that all pods and ranks agree.

Positions keep their meaning along a line: what a rank has received stays received, wherever the rest comes from.
"""

from __future__ import annotations

import hashlib

__all__ = ["incarnation_of", "is_later", "line_of", "moves_of", "next_run", "same_line"]


def incarnation_of(line: str, moves: int) -> str:
    return f"{line}.{moves}" if moves else line


def line_of(incarnation: str) -> str:
    return incarnation.partition(".")[0]


def moves_of(incarnation: str) -> int:
    """How often the job had moved to other pods."""
    moves = incarnation.partition(".")[2]
    return int(moves) if moves.isdecimal() else 0


def next_run(line: str) -> str:
    """The run of the same name that begins when this one has ended."""
    return hashlib.blake2b(f"{line} again".encode(), digest_size=16).hexdigest()


def same_line(incarnation: str, other: str) -> bool:
    return line_of(incarnation) == line_of(other)


def is_later(incarnation: str, than: str) -> bool:
    """Whether a job is called so since it has moved from the pods on which it had the other name."""
    return same_line(incarnation, than) and moves_of(incarnation) > moves_of(than)
