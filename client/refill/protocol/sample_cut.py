"""Which parts of each sample does a rank want? Names of members, and byte ranges of some, the same for all samples.

They go into the query of a request, ``members=json,cls&ranges=mp4:0:65536``, and pods leave the rest out of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refill.errors import InvalidInput

_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_MOST_NAMES = 64
_MOST_LETTERS = 64


@dataclass(frozen=True)
class SampleCut:
    """Raises :class:`InvalidInput`, which names what is wrong."""

    members: tuple[str, ...] = ()
    """None at all: every member."""
    ranges: tuple[tuple[str, int, int], ...] = ()
    """Member, first byte, and how many from there on; a shorter member gives what it has."""

    def __post_init__(self) -> None:
        names = [*self.members, *(name for name, _, _ in self.ranges)]
        for name in names:
            if not isinstance(name, str) or len(name) > _MOST_LETTERS or not _NAME.fullmatch(name):
                raise InvalidInput(
                    f"{name!r:.80} is no name of a member or column, as json, mask.png or meta.id are: letters, digits,"
                    " _ and -, with dots between them"
                )
        if max(len(self.members), len(self.ranges)) > _MOST_NAMES:
            raise InvalidInput(f"members and ranges name at most {_MOST_NAMES} members each")
        if len({name for name, _, _ in self.ranges}) < len(self.ranges):
            raise InvalidInput("ranges names a member twice")
        for name, start, length in self.ranges:
            if not all(type(each) is int and 0 <= each < 2**62 for each in (start, length)):
                raise InvalidInput(
                    f"ranges[{name!r}] must be (first byte, number of bytes), got ({start!r}, {length!r})"
                )
            if not length:
                raise InvalidInput(f"ranges[{name!r}] is of no bytes, got ({start}, 0): leave {name!r} out of members")
            if self.members and name not in self.members:
                raise InvalidInput(f"ranges names {name!r}, which is not among members")

    @property
    def is_whole(self) -> bool:
        """Whether all of each sample is wanted."""
        return not (self.members or self.ranges)

    @classmethod
    def of(cls, members: Sequence[str] | None, ranges: Mapping[str, Any] | None) -> SampleCut:
        """As callers give it."""
        are_names = isinstance(members, Iterable) and not isinstance(members, str)
        names = tuple(members) if are_names and members is not None else ()
        if members is not None and not names:
            raise InvalidInput(f"members must be names, as ['json', 'cls'], got {members!r}")
        found = []
        for name, given in (ranges or {}).items():
            if not isinstance(given, (tuple, list)) or len(given) != 2:
                raise InvalidInput(f"ranges[{name!r}] must be (first byte, number of bytes), got {given!r:.80}")
            found.append((name, given[0], given[1]))
        return cls(names, tuple(found))

    def query(self) -> dict[str, str]:
        """What is added to a request's."""
        said = {}
        if self.members:
            said["members"] = ",".join(self.members)
        if self.ranges:
            said["ranges"] = ",".join(f"{name}:{start}:{length}" for name, start, length in self.ranges)
        return said

    @classmethod
    def parse(cls, members: str, ranges: str) -> SampleCut:
        """Of a request's query."""
        found = []
        for each in ranges.split(",") if ranges else ():
            name, *numbers = each.split(":")
            if len(numbers) != 2 or not all(number.isdecimal() and len(number) < 20 for number in numbers):
                raise InvalidInput(f"a range is member:first:count, got {each!r:.80}")
            found.append((name, int(numbers[0]), int(numbers[1])))
        return cls(tuple(members.split(",")) if members else (), tuple(found))
