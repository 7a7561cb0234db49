"""What of a sample leaves the pod, where a rank wants a part? Its tar range, with the headers of what is in it.

So clients read it as any other. Of other formats than tars a pod knows no parts, but that of plain files: all of it is
one field.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from refill.errors import InvalidInput, RefillError
from refill.protocol.sample_cut import SampleCut
from refill.tar_samples import parse_members
from refill_service.memory.payload import Damage, Payload

__all__ = ["check_cut", "cut_samples"]

_BLOCK = tarfile.BLOCKSIZE


def check_cut(cut: SampleCut, metadata: Mapping[str, Any]) -> None:
    """Raises :class:`InvalidInput` where a dataset's samples have no such parts."""
    about = metadata.get("format")
    if about is None or (cut == SampleCut()):
        return
    name = about.get("name") if isinstance(about, dict) else None
    if name != "objects":
        raise InvalidInput(
            f"members and ranges are of samples in tars, and this dataset's format is {str(name)[:60]}: have a "
            "transform leave out what is not wanted"
        )
    asked = {*cut.members, *(each for each, _, _ in cut.ranges)} - {"cls"}
    if asked != {about.get("field")}:
        raise InvalidInput(
            f"samples are files of one field, {about.get('field')!r}, and not {', '.join(sorted(asked))}"
        )


def cut_samples(
    cut: SampleCut, metadata: Mapping[str, Any], ids: Sequence[int], payloads: Sequence[Payload]
) -> list[Payload]:
    """What is wanted of each. A sample that can't be read stays as it is, for the client to find out.

    Raises :class:`InvalidInput` as :func:`check_cut` does, and for a sample that has none of the members.
    """
    check_cut(cut, metadata)
    if cut == SampleCut():
        return list(payloads)
    if metadata.get("format") is not None:
        (_, start, length), *_ = cut.ranges or (("", 0, 1 << 62),)
        return [each if type(each) is Damage else each[start : start + length] for each in payloads]
    ranges = {name: (start, length) for name, start, length in cut.ranges}
    return [
        each if type(each) is Damage else _cut(cut, ranges, sample, each)
        for sample, each in zip(ids, payloads, strict=True)
    ]


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
