"""What does one line of the table of docs/CLUSTER.md say?"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["HEAD", "Row"]

_COLUMNS = (
    "event",
    "every sample exactly once",
    "until all pods are ready again",
    "longest without a batch",
    "in all over 1 s",
    "most memory of a pod",
    "Kubernetes and pods said",
    "what to do",
)
HEAD = f"| {' | '.join(_COLUMNS)} |\n|{' --- |' * len(_COLUMNS)}"


class Row(NamedTuple):
    event: str
    exact: str
    ready_seconds: float | None = None
    longest_seconds: float | None = None
    all_seconds: float | None = None
    memory: str = ""
    said: str = ""
    to_do: str = ""

    def __str__(self) -> str:
        seconds = [
            "" if s is None else f"{s:.1f} s" for s in (self.ready_seconds, self.longest_seconds, self.all_seconds)
        ]
        cells = [self.event, self.exact, *seconds, self.memory, self.said, self.to_do]
        return "| " + " | ".join(map(_in_a_cell, cells)) + " |"


def _in_a_cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
