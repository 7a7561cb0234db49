"""Which training process asks as a rank? Named so that two that call themselves the same can be told apart.

A *life* of a rank is a training process with its loader workers. On the wire it is ``HOST:PROCESS:STARTED:PLACE``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from refill.errors import InvalidInput

LONGEST_LIFE = 160
"""Characters, on the wire."""
_LONGEST_HOST = 64

_WIRE = re.compile(rf"([A-Za-z0-9._-]{{1,{_LONGEST_HOST}}}):([0-9]{{1,10}}):([0-9]{{1,20}}):([0-9a-f]{{0,32}})")


@dataclass(frozen=True)
class RankLife:
    """Names one training process among all that may call themselves the same rank.

    :param process: its number, on its host.
    :param started: when it was started, in a unit of its place; 0 if that can't be told. Numbers are used again.
    :param place: the same for two processes that see each other's numbers: of one machine, and of one container there.
        Empty if that can't be told.
    """

    host: str
    process: int
    started: int
    place: str

    def encode(self) -> str:
        return f"{self.host}:{self.process}:{self.started}:{self.place}"

    @classmethod
    def decode(cls, text: str) -> RankLife:
        """Raises :class:`InvalidInput` for anything that :meth:`encode` did not write."""
        found = _WIRE.fullmatch(text)
        if found is None:
            raise InvalidInput(f"{text[:LONGEST_LIFE]!r} names no training process: that is HOST:PROCESS:STARTED:PLACE")
        host, process, started, place = found.groups()
        return cls(host, int(process), int(started), place)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


def host_for_life(name: str) -> str:
    """A host's name as :class:`RankLife` may hold it."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)[:_LONGEST_HOST] or "unknown"
