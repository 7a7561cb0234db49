"""What of a sample leaves the pod, where a rank wants a part? Of a tar's, its range with the headers of what is in it;
of other formats, less of the same: in the format's own layout, what is left is a sample of fewer fields
(``refill/formats/cut.py``). So clients read it as any other.
"""

from __future__ import annotations

import asyncio
import struct
import tarfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from refill.errors import InvalidInput, RefillError
from refill.formats.rows import FIXED
from refill.formats.tar_samples import parse_members
from refill.formats.zip import members_of, shortened
from refill.protocol.sample_cut import SampleCut
from refill_service.memory.payload import Damage, Payload

_BLOCK = tarfile.BLOCKSIZE
CUT_AT_ONCE = 256
"""Samples: some milliseconds of the pod's loop (``make bench-cuts``)."""
_BYTES_AT_ONCE = 8 << 20


def cut_samples(
    cut: SampleCut, metadata: Mapping[str, Any], ids: Sequence[int], payloads: Sequence[Payload]
) -> list[Payload]:
    """What is wanted of each, which the dataset's samples may have (:func:`refill.formats.cut.check_cut`). A sample
    that can't be read is left for the client to find out.

    Raises :class:`InvalidInput` for a sample in a tar or archive that has none of the members.
    """
    if cut.is_whole:
        return list(payloads)
    about = metadata.get("format")
    if about is not None:
        of_format: Callable[[memoryview], Payload] = cutter_of(about, cut)
        return [each if type(each) is Damage else of_format(memoryview(each)) for each in payloads]
    ranges = {name: (start, length) for name, start, length in cut.ranges}
    return [
        each if type(each) is Damage else _cut(cut, ranges, sample, each)
        for sample, each in zip(ids, payloads, strict=True)
    ]


async def cut_in_turns(
    cut: SampleCut, metadata: Mapping[str, Any], ids: Sequence[int], payloads: Sequence[Payload]
) -> list[Payload]:
    """As :func:`cut_samples`, of any number: others have the loop in between."""
    if cut.is_whole:
        return list(payloads)
    found: list[Payload] = []
    first = num_bytes = 0
    for place, payload in enumerate(payloads, 1):
        num_bytes += len(payload)
        if place == len(payloads) or place - first == CUT_AT_ONCE or num_bytes > _BYTES_AT_ONCE:
            found += cut_samples(cut, metadata, ids[first:place], payloads[first:place])
            first, num_bytes = place, 0
            await asyncio.sleep(0)
    return found


def _cut(cut: SampleCut, ranges: Mapping[str, tuple[int, int]], sample: int, payload: Payload) -> Payload:
    try:
        key, members = parse_members(memoryview(payload), sample)
    except RefillError:
        return payload
    pieces: list[Payload] = []
    for name, data in members.items():
        if cut.members and name not in cut.members:
            continue
        if (wanted := ranges.get(name)) is not None:
            data = data[wanted[0] : wanted[0] + wanted[1]]
        pieces += (_header(f"{key}.{name}", len(data)), data, bytes(-len(data) % _BLOCK))
    if not pieces:
        raise InvalidInput(
            f"sample {sample} ({key!r}) has no member {' or '.join(map(repr, cut.members))}; it has "
            f"{', '.join(map(repr, members))}"
        )
    return b"".join(pieces)


@lru_cache(maxsize=4096)
def _header(name: str, size_bytes: int) -> bytes:
    header = tarfile.TarInfo(name)
    header.size = size_bytes
    return header.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


NOT_CUT = b""
"""What becomes of a sample that is not what its format says: no parser takes it for one."""

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
