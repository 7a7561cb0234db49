"""What became of requests? Counted for the metrics, on all ports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["RequestCounts"]


@dataclass
class RequestCounts:
    """What is counted of the requests to a pod."""

    under_way: Counter[str] = field(default_factory=Counter)
    """Of ``client``s and of other ``pod``s, without probes."""
    by_status: Counter[int] = field(default_factory=Counter)
    """Answers from 400 on; those to probes are none."""
    connections_cut: int = 0
    """Of clients that sent or read too slowly."""
