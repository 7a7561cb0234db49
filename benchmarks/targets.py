"""How is a measured figure shown beside what it has to reach?"""

from __future__ import annotations

__all__ = ["target"]


def target(what: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
    """Print one line: what was measured, its value, the bound, and whether it was reached."""
    reached = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    bound = f">= {at_least:,g}" if at_least is not None else f"<= {at_most:,g}"
    print(f"{what:72} {value:12,.3f}   {bound:>10}   {'reached' if reached else 'NOT REACHED'}", flush=True)
