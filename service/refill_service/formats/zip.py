"""Zip archives whose members are stored: where do members lie? The directory at an archive's end says it.

A range begins with the header that a member has in the archive, so that no header is read to index: the parser finds
the bytes behind it. Members beside each other with the same key are a sample, as in tars; an ``.npz`` is one, with a
field for each array. Members that are compressed or encrypted, or were written as a stream (their headers say no
sizes), are refused.

Arrays of an ``.npz`` need ``decode=True``. ``--format objects`` takes archives whole, a file a sample. Tested against
numpy and Python's zipfile.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from refill.errors import EmptyDataset, InvalidInput
from refill.formats.tar_samples import split_name
from refill_service.cache_core.dataset_index import RecordArray
from refill_service.formats.interface import Listing, Options, Plan, Shard, ShardBytes, ShardReport, Source, records_of
from refill_service.formats.shard_reader import repeated_keys

NAME = "zip"

_END = struct.Struct("<4s4H2IH")
"""Magic, numbers of disks, members here and in all, bytes and place of the directory, bytes of a comment."""
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s4xHH8xII3H8xI")
"""Magic, flags, method, bytes in the archive, bytes, letters of the name, bytes of extras and comment, place."""
_END_MAGIC, _END64_MAGIC, _LOCATOR_MAGIC, _ENTRY_MAGIC = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2"
_TAIL_BYTES = _END64.size + _LOCATOR.size + _END.size
_MOST_TAIL_BYTES = _TAIL_BYTES + 65_535
_LEAST_MEMBER_BYTES = 30
_EXTRA_BYTES_AT = 28
"""Where in the header of a member is said how much lies between its name and its bytes."""
_MOST_DIRECTORY_BYTES = 256 << 20
_IN_EXTRA = 0xFFFFFFFF
_ENCRYPTED, _STREAMED, _UTF8 = 1, 8, 0x800


class _Member(NamedTuple):
    """A member, as the directory of an archive names it."""

    start: int
    size: int
    """Of its bytes, without the header."""
    name: str
    name_bytes: int
    method: int
    flags: int


def found(listing: Listing, options: Options) -> bool:
    return 2 * len(listing.named(".zip", ".npz")) > len(listing.objects)


async def plan(listing: Listing, source: Source, options: Options) -> Plan:
    archives, arrays = listing.named(".zip"), listing.named(".npz")
    if archives and arrays:
        raise InvalidInput(f"{listing.url} holds .zip and .npz: index what is alike, in a folder of its own")
    files = archives or arrays
    if not files:
        raise EmptyDataset(f"{listing.url} holds no .zip and no .npz")
    about = {"whole": not archives}
    what = "zip archives, a sample the members of one key" if archives else "files .npz, each a sample"
    return Plan(f"{len(files):,} {what}", [Shard.of(each, about) for each in files], about, False)


def scan(shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]:
    members, directory = _members(shard, data)
    members.sort()
    starts, ends, before, has_gap = list[int](), list[int](), None, False
    for each, next_start in zip(members, [*[other.start for other in members], directory][1:], strict=True):
        if each.start + _LEAST_MEMBER_BYTES + each.size > next_start:
            why = f"member {each.name[:60]!r} of {each.size} bytes can't lie there: the next one begins at byte "
            raise data.damaged(f"{why}{next_start}", each.start)
        key = "" if shard.about["whole"] else _key(each.name)
        if key is None:
            report.num_passed_over += 1  # it counts to the sample around it only if that goes on behind it
            has_gap = has_gap or _end(each, next_start, data) != next_start
            continue
        _refuse_unreadable(each, data)
        end = _end(each, next_start, data)
        if key == before and has_gap:
            raise data.damaged(
                f"before member {each.name[:60]!r} lie bytes of no member, within a sample: one was deleted, or "
                "replaced by a later one. Write the archive anew",
                each.start,
            )
        has_gap = end != next_start
        if key == before:
            ends[-1] = end
        else:
            starts.append(each.start)
            ends.append(end)
            report.key_hashes.append(xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogateescape")))
        before = key
    if not shard.about["whole"]:
        report.repeated = repeated_keys(report.key_hashes)
    yield records_of(np.array(starts, np.int64), np.array(ends, np.int64) - np.array(starts, np.int64))


def _end(member: _Member, next_start: int, data: ShardBytes) -> int:
    """Where its bytes end. Up to the next one there may be what is of no member: one that was deleted."""
    known = member.start + _LEAST_MEMBER_BYTES + member.name_bytes + member.size
    if next_start - known <= _LEAST_MEMBER_BYTES:  # no other has room there: it is what the header says besides
        return next_start
    at = member.start + _EXTRA_BYTES_AT
    end = known + int.from_bytes(data.read(at, at + 2), "little")
    if end > next_start:
        raise data.damaged(f"member {member.name[:60]!r} ends at byte {end}, within the next one", member.start)
    return end


def _key(name: str) -> str | None:
    """None: it is of no sample."""
    parts = split_name(name)
    return None if parts is None else parts[0]


def _refuse_unreadable(member: _Member, data: ShardBytes) -> None:
    named = f"member {member.name[:60]!r}"
    if member.flags & _ENCRYPTED:
        raise data.damaged(f"{named} is encrypted, and pods have no keys", member.start)
    if member.method:
        raise data.damaged(
            f"{named} is compressed (method {member.method}), and only stored ones are read: write it anew by zip -0, "
            "numpy.savez, or zipfile with ZIP_STORED; --format objects reads whole files",
            member.start,
        )
    if member.flags & _STREAMED:
        raise data.damaged(
            f"{named} was written as a stream (as torch.save does), so that its header says no size: write it anew into"
            " a file, by zipfile for example; --format objects reads whole files",
            member.start,
        )


def _members(shard: Shard, data: ShardBytes) -> tuple[list[_Member], int]:
    """All of them, and where the directory begins."""
    size = shard.size_bytes
    tail = data.read(max(0, size - _TAIL_BYTES), size)
    if tail[-_END.size :][:4] != _END_MAGIC:  # a comment follows
        tail = data.read(max(0, size - _MOST_TAIL_BYTES), size)
    at = bytes(tail).rfind(_END_MAGIC)
    if at < 0 or at + _END.size > len(tail):
        raise data.damaged("it is no zip archive, or cut off: it has no directory at its end", max(0, size - 1))
    _, disk, first_disk, here, count, directory_bytes, start, _ = _END.unpack_from(tail, at)
    end = size - len(tail) + at
    large, locator = at - _LOCATOR.size - _END64.size, at - _LOCATOR.size
    if large >= 0 and bytes(tail[locator:][:4]) == _LOCATOR_MAGIC and bytes(tail[large:][:4]) == _END64_MAGIC:
        *_, here, count, directory_bytes, start = _END64.unpack_from(tail, large)
        end -= _LOCATOR.size + _END64.size
    if (disk, first_disk) != (0, 0) or here != count:
        raise data.damaged("it is a part of an archive of several", end)
    if 0 < end - start - directory_bytes <= start + directory_bytes and directory_bytes:
        raise data.damaged(
            f"its directory can't lie at byte {start}, but {end - start - directory_bytes:,} bytes later: if these "
            "were put before the archive, as of one that extracts itself, `zip -A` counts them",
            end,
        )
    if (
        start + directory_bytes != end
        or directory_bytes > _MOST_DIRECTORY_BYTES
        or count * _ENTRY.size > directory_bytes
    ):
        raise data.damaged(f"its directory, {count} members in {directory_bytes} bytes, can't lie at byte {start}", end)
    directory = data.read(start, end)
    found, place = dict[str, _Member](), 0
    for _ in range(count):
        try:
            member, place = _entry(directory, place)
        except (ValueError, struct.error) as error:
            raise data.damaged(f"its directory is damaged: {error}", start + place) from error
        found[member.name] = member  # the last of a name, as zipfile has it
    return list(found.values()), start


def _entry(directory: memoryview, place: int) -> tuple[_Member, int]:
    magic, flags, method, size, plain_size, name_bytes, extra_bytes, comment_bytes, start = _ENTRY.unpack_from(
        directory, place
    )
    name_end = place + _ENTRY.size + name_bytes
    end = name_end + extra_bytes + comment_bytes
    if magic != _ENTRY_MAGIC or end > len(directory):
        raise ValueError("an entry is cut off, or none")
    if _IN_EXTRA in (size, plain_size, start):
        extra = directory[name_end : name_end + extra_bytes]
        wanted = [each == _IN_EXTRA for each in (plain_size, size, start)]
        large = iter(_zip64(extra, sum(wanted)))
        plain_size, size, start = (
            next(large) if is_there else each for each, is_there in zip((plain_size, size, start), wanted, strict=True)
        )
    name = bytes(directory[name_end - name_bytes : name_end]).decode("utf-8" if flags & _UTF8 else "cp437")
    return _Member(start, size, name, name_bytes, method, flags), end


def _zip64(extra: memoryview, count: int) -> tuple[int, ...]:
    place = 0
    while place + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, place)
        if kind == 1:
            found = struct.unpack_from(f"<{count}Q", extra, place + 4)
            if max(found) >= 2**62:
                raise ValueError("a member can't be so large")
            return found
        place += 4 + size
    raise ValueError("a large member does not say how large")
