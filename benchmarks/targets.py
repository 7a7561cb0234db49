"""How is a measured figure shown beside what it has to reach, and read again from what was printed?"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Target", "target", "targets_in"]

_LINE = re.compile(r"^(.*\S) +(-?[\d,]+\.\d{3}|nan|inf) +([<>]= [\d.,e+-]+) +(reached|NOT REACHED)$", re.MULTILINE)


class Target(NamedTuple):
    """As it was printed."""

    what: str
    value: str
    bound: str
    is_reached: bool


def target(what: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
    """Print one line: what was measured, its value, the bound, and whether it was reached."""
    reached = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    bound = f">= {at_least:,g}" if at_least is not None else f"<= {at_most:,g}"
    print(f"{what:72} {value:12,.3f}   {bound:>10}   {'reached' if reached else 'NOT REACHED'}", flush=True)


def targets_in(printed: str) -> list[Target]:
    """All that a program has printed so."""
    return [Target(what, value, bound, verdict == "reached") for what, value, bound, verdict in _LINE.findall(printed)]
