"""What of a sample leaves the pod, where a rank wants a part? Of a tar's, its range with the headers of what is in it;
of other formats, less of the same (``cut_fields.py``). So clients read it as any other.
"""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from refill.errors import InvalidInput, RefillError
from refill.protocol.sample_cut import SampleCut
from refill.tar_samples import parse_members
from refill_service.memory.payload import Damage, Payload
from refill_service.serving.cut_fields import cutter_of

__all__ = ["CUT_AT_ONCE", "cut_in_turns", "cut_samples"]

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
