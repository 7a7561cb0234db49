"""How does a pod leave fields out of a sample in a format of others? In the format's own layout, so that what is left
is one of fewer fields (``refill/formats/cut.py``).

A sample that is not what its format says becomes no bytes at all, which no parser takes for one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from refill.errors import InvalidInput
from refill.formats.rows import FIXED
from refill.formats.zip import members_of, shortened
from refill.protocol.sample_cut import SampleCut
from refill_service.memory.payload import Payload

__all__ = ["NOT_CUT", "cutter_of"]

NOT_CUT = b""

_Part = tuple[int, int] | None
"""Bytes ``[start, stop)`` that are wanted of a field, as far as it has them; None: none."""
_ALL = 0, 1 << 62


def cutter_of(about: Mapping[str, Any], cut: SampleCut) -> Callable[[memoryview], Payload]:
    """Of samples of a format with this description, which has been checked. It raises :class:`InvalidInput` for a
    sample in an archive that has none of the members."""
    ranges = {name: (start, start + length) for name, start, length in cut.ranges}

    def part_of(name: str) -> _Part:
        return ranges.get(name, _ALL) if not cut.members or name in cut.members else None

    match about["name"]:
        case "objects":
            start, stop = next(iter(ranges.values()), _ALL)
            return lambda data: data[start:stop]
        case "zip":
            return lambda data: _of_archive(data, part_of, whole=bool(about["whole"]))
        case "mds":
            values = [(int(size or 0), part_of(str(name))) for name, _, size in about["columns"]]
            return _of_values([size for size, _ in values], [part for _, part in values])
        case "litdata":
            return _of_values([0] * len(about["leaves"]), [part_of(str(name)) for name, _ in about["leaves"]])
        case _:
            columns = about["columns"]
            return _of_rows([str(kind) for _, kind in columns], [part_of(str(name)) for name, _ in columns])


def _of_values(sizes: Sequence[int], parts: Sequence[_Part]) -> Callable[[memoryview], Payload]:
    """A u32 size of each value whose size varies, then all values.

    :param sizes: of values; 0: it varies.
    """
    said = struct.Struct(f"<{sizes.count(0)}I")
    left = struct.Struct(f"<{sum(not size and part is not None for size, part in zip(sizes, parts, strict=True))}I")

    def cut(data: memoryview) -> Payload:
        if len(data) < said.size:
            return NOT_CUT
        varying, place = iter(said.unpack_from(data)), said.size
        pieces, lengths = list[Payload](), list[int]()
        for size, part in zip(sizes, parts, strict=True):
            end = place + (size or next(varying))
            if part is not None:
                pieces.append(_piece(data, place, end, part))
                if not size:
                    lengths.append(len(pieces[-1]))
            place = end
        return b"".join((left.pack(*lengths), *pieces)) if place == len(data) else NOT_CUT

    return cut


def _of_rows(kinds: Sequence[str], parts: Sequence[_Part]) -> Callable[[memoryview], Payload]:
    """Of tables: as ``refill/formats/rows.py`` describes them."""
    head = _head(kinds)
    left = _head([kind for kind, part in zip(kinds, parts, strict=True) if part is not None])

    def cut(data: memoryview) -> Payload:
        if len(data) < head.size:
            return NOT_CUT
        null_bits, *values = head.unpack_from(data)
        nulls, place, bits, num_left = int.from_bytes(null_bits, "little"), head.size, 0, 0
        pieces, said = list[Payload](), list[Any]()
        for kind, value, part in zip(kinds, values, parts, strict=True):
            end = place if kind in FIXED else place + value
            if part is not None:
                bits |= (nulls & 1) << num_left
                num_left += 1
                if kind in FIXED:
                    said.append(value)
                else:
                    pieces.append(_piece(data, place, end, part))
                    said.append(len(pieces[-1]))
            place, nulls = end, nulls >> 1
        if place != len(data):
            return NOT_CUT
        return b"".join((left.pack(bits.to_bytes((num_left + 7) // 8, "little"), *said), *pieces))

    return cut


def _head(kinds: Sequence[str]) -> struct.Struct:
    return struct.Struct(f"<{(len(kinds) + 7) // 8}s{''.join(FIXED.get(kind, 'I') for kind in kinds)}")


def _of_archive(data: memoryview, part_of: Callable[[str], _Part], *, whole: bool) -> Payload:
    pieces, names = list[Payload](), list[str]()
    try:
        for name, content, start, end in members_of(data, whole=whole):
            part = part_of(name)
            names.append(name)
            if part == _ALL:
                pieces.append(data[start:end])
            elif part is not None:
                pieces += shortened(data[start:end], content[slice(*part)])
    except (ValueError, struct.error):
        return NOT_CUT
    if not pieces:
        raise InvalidInput(f"a sample has none of the members that are wanted; it has {', '.join(map(repr, names))}")
    return b"".join(pieces)


def _piece(data: memoryview, place: int, end: int, part: tuple[int, int]) -> memoryview:
    start, stop = part
    return data[min(place + start, end) : min(place + stop, end)]
