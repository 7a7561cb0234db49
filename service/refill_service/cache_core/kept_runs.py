"""Of which runs that have ended are receipts kept, and for how long? The newest of each team, within bounds.

A *run* is one registration of a job's name. What a pod keeps of it is a *part*: what that pod delivered in each epoch.
A pod keeps its own parts, and those that another one gave it, in memory.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_MOST_PARTS = 400
"""Of one team."""
_MOST_TEAM_BYTES = 4 << 20
_MOST_BYTES = 16 << 20
"""Of all teams; the team that has most gives way."""
_MOST_PART_BYTES = 2 << 20
"""Of one part, before it is compressed. The epochs before those that fit are not kept."""
_MOST_LINE_BYTES = 4 << 20
"""Of one epoch, which may have very many ranks. Longer ones are not kept."""
_MOST_ABOUT_BYTES = 256 << 10
"""Of what is said of a run, with the numbers of its epochs."""


@dataclass(frozen=True)
class RunPart:
    """What one pod delivered in a run.

    :param about: the job, its run and what it was, as :func:`about_job` in ``jobs/job_at_pod.py`` has it.
    :param lines: compressed JSON: a line for each epoch, the newest first.
    """

    about: dict[str, Any]
    lines: bytes

    @classmethod
    def of(cls, about: dict[str, Any], epochs: Iterable[dict[str, Any]]) -> RunPart:
        """:param epochs: this pod's part of the receipt of each, with its number as ``epoch``."""
        lines: list[bytes] = []
        num_bytes = 0
        for part in sorted(epochs, key=lambda part: -int(part["epoch"])):
            line = json.dumps(part, separators=(",", ":")).encode()
            num_bytes += len(line)
            if num_bytes > (_MOST_PART_BYTES if lines else _MOST_LINE_BYTES):
                break
            lines.append(line)
        kept = sorted(int(json.loads(line)["epoch"]) for line in lines)
        return cls(about | {"epochs": kept}, zlib.compress(b"\n".join(lines)))

    def epoch(self, number: int) -> dict[str, Any] | None:
        """Its part of an epoch's receipt; None when it has none."""
        if number not in self.about["epochs"]:
            return None
        unpacked = zlib.decompressobj()
        try:
            lines = unpacked.decompress(self.lines, _MOST_LINE_BYTES)
        except zlib.error as error:
            raise ValueError(f"the epochs of a run are damaged: {error}") from error
        if not unpacked.eof:
            raise ValueError("the epochs of a run are cut short, or longer than those of any")
        parts: Iterable[dict[str, Any]] = map(_decoded, lines.split(b"\n"))
        return next((part for part in parts if part["epoch"] == number), None)

    def encode(self) -> bytes:
        """For other pods: a line of JSON, then the compressed lines."""
        return json.dumps(self.about).encode() + b"\n" + self.lines

    @classmethod
    def decode(cls, encoded: bytes) -> RunPart:
        """Raises ValueError, KeyError or TypeError for what is none."""
        first, _, lines = encoded.partition(b"\n")
        if len(first) > _MOST_ABOUT_BYTES:
            raise ValueError(f"what is said of a run has {len(first)} bytes")
        about = _decoded(first)
        found = cls(about, lines)
        names = {"job": str, "run": str, "team": str, "pod": int, "num_pods": int, "ended_at": float, "epochs": list}
        for name, kind in names.items():
            if not isinstance(about[name], kind):
                raise TypeError(f"{name} of a run is {about[name]!r}")
        if about["epochs"] and found.epoch(about["epochs"][-1]) is None:
            raise ValueError("a run lacks the epochs that it names")
        return found

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.about["team"], self.about["job"], self.about["run"], self.about["pod"]

    @property
    def num_bytes(self) -> int:
        return len(self.lines) + 1024 + 40 * len(self.about["epochs"])


def _decoded(text: bytes) -> Any:
    """Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("that is nested too deep") from error


@dataclass
class _Team:
    """What is kept of one team's runs, and how many bytes of it."""

    parts: dict[tuple[str, str, str, int], RunPart] = field(default_factory=dict)
    num_bytes: int = 0

    def drop(self, part: RunPart) -> None:
        self.num_bytes -= part.num_bytes
        del self.parts[part.key]

    def oldest(self) -> RunPart:
        return min(self.parts.values(), key=lambda each: float(each.about["ended_at"]))


class KeptRuns:
    """Keeps what one pod knows of runs that have ended, for receipts, by team."""

    def __init__(self) -> None:
        self._teams: dict[str, _Team] = {}

    def put(self, part: RunPart) -> None:
        """Fact: a run has ended at a pod."""
        team = self._teams.setdefault(part.about["team"], _Team())
        if part.key in team.parts:
            team.drop(team.parts[part.key])
        team.parts[part.key] = part
        team.num_bytes += part.num_bytes
        while len(team.parts) > _MOST_PARTS or team.num_bytes > _MOST_TEAM_BYTES:
            team.drop(team.oldest())
        while sum(each.num_bytes for each in self._teams.values()) > _MOST_BYTES:
            largest = max(self._teams.values(), key=lambda each: each.num_bytes)
            largest.drop(largest.oldest())

    def of(self, team: str, job: str | None = None) -> list[RunPart]:
        """Those that a team may hear of: its own, and what nobody registered with a token. The newest run first.

        :param job: None: of all.
        """
        parts = [part for each in {"", team} & set(self._teams) for part in self._teams[each].parts.values()]
        found = [part for part in parts if job in (None, part.about["job"])]
        return sorted(found, key=lambda each: -float(each.about["ended_at"]))
