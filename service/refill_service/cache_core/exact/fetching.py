"""How many requests are fetched together before they are asked for, and when? DELI's fetch size and threshold.

DELI (IV-B): a loop's next requests stand in a queue. When no more than the threshold are left in it, the next ones join
it and are fetched together. So a threshold of 0 fetches when the queue is empty, and one as large as the size fetches
twice at first. What is fetched goes into a cache that evicts what came first.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HALF", "Fetching"]

HALF = "50/50"
"""In place of a number: half of what memory holds, as DELI recommends for both."""


@dataclass(frozen=True)
class Fetching:
    """How DELI's service fetches: so many requests at once, begun when so few are left."""

    size: int
    """Requests of one fetch; at least 1."""
    threshold: int
    """The next fetch is made when no more requests than this are left in the queue."""

    @classmethod
    def of(cls, size: int | str, threshold: int | str, memory_samples: float) -> Fetching | None:
        """As settings say it; None: nothing is fetched before it is asked for.

        :param memory_samples: what there is memory for.
        """
        half = max(1, int(memory_samples) // 2)
        if threshold == "auto":
            threshold = HALF if size == HALF else 0
        number = half if isinstance(size, str) else size
        return cls(number, half if isinstance(threshold, str) else threshold) if number else None

    def is_due(self, num_queued: int) -> bool:
        """Asked before each request leaves the queue, and again after a fetch: several may leave at once."""
        return num_queued <= self.threshold
