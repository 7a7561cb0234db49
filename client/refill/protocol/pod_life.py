"""Which process of a pod is meant? Two processes may be one pod for a while: one that stood still, and its successor.

A *life* of a pod is one run of it. Lives are ordered: of two of the same pod, the later one is the successor. On the
wire it is ``NUMBER-NAME``, and in a header, after the number of its pod, ``POD NUMBER-NAME``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from refill.errors import InvalidInput

__all__ = ["LIFE_HEADER", "PodLife", "pod_life_of"]

LIFE_HEADER = "refill-life"
"""Of a request: who asks. Of an answer: who answers."""

_WIRE = re.compile(r"([0-9]{1,19})-([0-9a-f]{1,32})")


class PodLife(NamedTuple):
    """Ordered by ``number``; ``name`` is that of one run alone, and stays when the number rises."""

    number: int
    name: str

    def encode(self) -> str:
        return f"{self.number}-{self.name}"

    @classmethod
    def decode(cls, text: str) -> PodLife:
        """Raises :class:`InvalidInput` for anything that :meth:`encode` did not write."""
        found = _WIRE.fullmatch(text)
        if found is None:
            raise InvalidInput(f"{text[:60]!r} names no process of a pod: that is NUMBER-NAME")
        return cls(int(found[1]), found[2])


def pod_life_of(header: str | None) -> tuple[int, PodLife] | None:
    """``(pod, life)`` as :data:`LIFE_HEADER` has it; None where there is none, as of pods of earlier versions."""
    if header is None:
        return None
    pod, _, life = header.partition(" ")
    if not (pod.isascii() and pod.isdecimal()) or len(pod) > 9:
        raise InvalidInput(f"{header[:60]!r} names no process of a pod: that is POD NUMBER-NAME")
    return int(pod), PodLife.decode(life)
