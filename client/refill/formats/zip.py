"""Stored zip members: a sample is one, or a few beside each other, each with the header that it has in the archive.

Fields are as of tars: the extension of a member is its name. Of ``.npz`` (``about["whole"]``) all members are one
sample, each a field of its own name, for ``decode`` an array.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from refill.formats.parsed import Coded, Parser, damaged, named
from refill.formats.tar_samples import split_name

_HEADER = struct.Struct("<4s2xHH8xIIHH")
"""Magic, flags, method, bytes in the archive, bytes of the member, letters of its name, bytes of what else is said."""
_MAGIC = b"PK\3\4"
_IN_EXTRA = 0xFFFFFFFF
_ENCRYPTED, _STREAMED = 1, 8


def make_parser(about: Mapping[str, Any]) -> Parser:
    whole = bool(about["whole"])

    def parse(data: memoryview, sample_id: int) -> tuple[str, dict[str, Any]]:
        place, key, fields = 0, None, dict[str, Any]()
        while place < len(data):
            start = place
            try:
                name, content, place = _member(data, place)
            except (ValueError, struct.error) as error:
                raise damaged(sample_id, "zip member", start, str(error)[:200]) from error
            if whole:
                fields[name.removesuffix(".npy")] = Coded("npy", content) if name.endswith(".npy") else content
                continue
            found = split_name(name)
            if found is None:  # of no sample, between two members of this one
                continue
            if (key is not None and found[0] != key) or found[1] in fields:
                raise damaged(sample_id, "zip member", start, f"{name[:100]!r} is of another sample, or there twice")
            key, extension = found
            fields[extension] = content
        if not fields:
            raise damaged(sample_id, "zip member", 0, "there is none")
        own, fields = named(fields, sample_id)
        return (own if key is None else key), fields

    return parse


def members_of(data: memoryview, *, whole: bool) -> Iterator[tuple[str, memoryview, int, int]]:
    """``(name of the field, its bytes, where its header begins, where its bytes end)`` of each member. Raises
    :class:`ValueError` or :class:`struct.error` where there is none."""
    place = 0
    while place < len(data):
        start = place
        name, content, place = _member(data, start)
        found = (name.removesuffix(".npy"),) if whole else (split_name(name) or ("", name))[1:]
        yield found[0], content, start, place


def shortened(member: memoryview, content: memoryview) -> list[bytes | memoryview]:
    """A member, its header first, with less content than it had."""
    _, flags, method, _, _, name_bytes, _ = _HEADER.unpack_from(member)
    header = _HEADER.pack(_MAGIC, flags, method, len(content), len(content), name_bytes, 0)
    return [header, member[_HEADER.size : _HEADER.size + name_bytes], content]


def _member(data: memoryview, place: int) -> tuple[str, memoryview, int]:
    """``(name, bytes, place behind it)``."""
    magic, flags, method, size, _, name_bytes, extra_bytes = _HEADER.unpack_from(data, place)
    if magic != _MAGIC or method or flags & (_ENCRYPTED | _STREAMED):
        raise ValueError("no stored member begins there")
    name_end = place + _HEADER.size + name_bytes
    start = name_end + extra_bytes
    if size == _IN_EXTRA:
        size = _large_size(data[name_end:start])
    if start + size > len(data):
        raise ValueError(f"it ends at byte {start + size} of {len(data)}")
    name = bytes(data[name_end - name_bytes : name_end]).decode("utf-8" if flags & 0x800 else "cp437")
    return name, data[start : start + size], start + size


def _large_size(extra: memoryview) -> int:
    place = 0
    while place + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, place)
        if kind == 1:  # zip64: the member's bytes, then those in the archive
            return int(struct.unpack_from("<QQ", extra, place + 4)[1])
        place += 4 + size
    raise ValueError("it does not say how large it is")
