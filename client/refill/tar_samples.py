"""What is in a sample? The members of its tar range, by extension, as WebDataset names them.

A parser of its own in place of tarfile: this runs once for each sample in every loader worker, and tarfile's objects
cost about ten times as much (benchmarks/client_decode.py prints the ratio). It reads what WebDataset writers write:
ustar headers, pax extended headers (path, size) and GNU long names. tests/client/test_tar_samples.py holds it
against tarfile.
"""

from __future__ import annotations

from refill.errors import SampleDamaged

__all__ = ["parse_members", "split_name"]

_BLOCK = 512
_REGULAR = (b"0", b"\0", b"7")


def parse_members(data: memoryview, sample_id: int) -> tuple[str, dict[str, memoryview]]:
    """``(key, {extension: bytes})`` of a sample; the values are views into ``data``.

    Raises :class:`SampleDamaged` when the range does not hold whole tar members of one sample.
    """
    key: str | None = None
    members: dict[str, memoryview] = {}
    place, end = 0, len(data)
    long_name: str | None = None
    long_size: int | None = None
    while place + _BLOCK <= end:
        header = bytes(data[place : place + _BLOCK])
        if header[0] == 0 and not header.strip(b"\0"):
            break  # end-of-archive blocks
        size = long_size if long_size is not None else _number(header[124:136], sample_id, place)
        start = place + _BLOCK
        kind = header[156:157]
        if start + size > end:
            raise _damaged(sample_id, place, f"a member of {size} bytes runs past the sample's {end}")
        place = start + -(-size // _BLOCK) * _BLOCK
        if kind == b"x":
            records = _pax(bytes(data[start : start + size]), sample_id, start)
            long_name = records.get("path", long_name)
            long_size = int(records["size"]) if "size" in records else long_size
            continue
        if kind == b"L":
            long_name = bytes(data[start : start + size]).rstrip(b"\0").decode("utf-8", "surrogateescape")
            continue
        if kind in _REGULAR:
            name = long_name if long_name is not None else _name(header)
            member_key, extension = split_name(name)
            if key is None:
                key = member_key
            members[extension] = data[start : start + size]
        if kind != b"K" and kind != b"g":
            long_name = long_size = None
    if key is None:
        raise _damaged(sample_id, 0, "there is no tar member in it")
    return key, members


def split_name(name: str) -> tuple[str, str]:
    """WebDataset's rule: the key is the path up to the first dot of the base name, the extension is the rest."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{folder}{slash}{stem}", extension


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")


def _number(field: bytes, sample_id: int, place: int) -> int:
    if field[0] & 0x80:  # GNU base-256, for members of 8 GiB and more
        return int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
    digits = field.strip(b" \0")
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        raise _damaged(sample_id, place, f"{digits!r} is not a size") from None


def _pax(text: bytes, sample_id: int, place: int) -> dict[str, str]:
    """Records ``<length> <name>=<value>\\n``; the length counts the whole record."""
    records = {}
    at = 0
    while at < len(text):
        space = text.find(b" ", at)
        try:
            length = int(text[at:space])
            name, value = text[space + 1 : at + length - 1].split(b"=", 1)
        except ValueError:
            raise _damaged(sample_id, place + at, "a pax header can't be read") from None
        if length <= 0:
            raise _damaged(sample_id, place + at, "a pax header can't be read")
        records[name.decode()] = value.decode("utf-8", "surrogateescape")
        at += length
    return records


def _damaged(sample_id: int, place: int, why: str) -> SampleDamaged:
    return SampleDamaged(f"sample {sample_id} is no tar range, at its byte {place}: {why}", sample=sample_id)
