"""Are there the members that a caller names? One that only some samples have is right, and one that none has is a typo.

Indexes of tars do not say which members there are, so the samples that come are looked at, until each name was found or
enough came without it. Decoders of extensions that this dataset does not have, ``png`` beside ``jpg``, are no mistake.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from refill.formats.parsed import Coded
from refill.protocol.sample_cut import SampleCut

_ENOUGH = 256
_SHOWN = 20


class AskedMembers:
    """Names of members in ``decode``, ``members`` and ``ranges``, and which of them came to a rank. Warns once.

    :param decode: as callers give it.
    :param shared: makes zeros ``(n,)``, int64, that all processes of the rank share.
    """

    def __init__(self, decode: Any, cut: SampleCut, shared: Callable[[int], Any]) -> None:
        to_decode = [name for name in decode if isinstance(name, str)] if isinstance(decode, Mapping) else []
        self._names = [(name.lower().lstrip("."), "decode") for name in to_decode]
        self._names += [(name, "members") for name in cut.members]
        self._names += [(name, "ranges") for name, _, _ in cut.ranges if name not in cut.members]
        self._found: Any = shared(2 + len(self._names)) if self._names else None
        """How many samples were looked at, whether it was said, and of each name whether there is one. Processes count
        without a lock, and may lose a few."""
        self._missing = set(self._names)
        """Not found by this process."""
        self._seen: set[str] = set()
        self._enough: int | None = None

    def begin(self, num_samples: int) -> None:
        """Fact: a rank has so many in an epoch. Before, nothing is looked at."""
        self._enough = max(1, min(_ENOUGH, num_samples))

    def look(self, members: Mapping[str, Any]) -> None:
        """Fact: what a sample has, as parsed."""
        if not self._missing or self._enough is None:
            return
        self._seen |= members.keys()
        decoded = set(_that_are_decoded(members))
        for place, (name, what) in enumerate(self._names, 2):
            if name in (decoded if what == "decode" else members):
                self._found[place] = 1
                self._missing.discard((name, what))
        self._found[0] += 1
        if self._missing and self._found[0] >= self._enough:
            self._missing.clear()
            if not self._found[1]:
                self._found[1] = 1
                self._say([bool(each) for each in self._found[2:]])

    def _say(self, found: Sequence[bool]) -> None:
        """:param found: each name."""
        missing = [name for name, was_found in zip(self._names, found, strict=True) if not was_found]
        decodes_some = any(
            was_found and what == "decode" for (_, what), was_found in zip(self._names, found, strict=True)
        )
        others = sorted(self._seen - {name for name, _ in self._names})
        said = []
        for name, what in missing:
            near = difflib.get_close_matches(name, others, 1)
            if what == "decode" and name in self._seen:
                said.append(f"decode names {name!r}, which is no bytes, and stays as it is: use transform")
            elif what != "decode" or near or not decodes_some:
                said.append(f"{what} names {name!r}, which none has" + (f" (is {near[0]} meant?)" if near else ""))
        if said:
            there = ", ".join(sorted(self._seen)[:_SHOWN])
            warnings.warn(
                f"of the first {self._enough} samples: {'; '.join(said)}; they have {there} (process {os.getpid()})",
                stacklevel=2,
            )


def _that_are_decoded(members: Mapping[str, Any]) -> Iterable[str]:
    """By each name that a decoder is found by."""
    for name, value in members.items():
        each = value[0] if type(value) is list and value else value
        if isinstance(each, (bytes, memoryview, Coded)):
            yield from (name.lower(), name.lower().rpartition(".")[2])
        if isinstance(each, Coded):
            yield from (each.kind, each.kind.rpartition(".")[2])
