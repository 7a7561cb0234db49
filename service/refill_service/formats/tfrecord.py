"""TFRecord: where do records lie? Only the records themselves say it, one after another, or an index file beside them.

A record is u64 length | u32 crc of it | data | u32 crc of the data; a sample is a whole record, so that readers can
check it once more. Without an index, a file is read once, and each crc is checked. With ``X.tfindex`` or ``X.idx``
beside each file, lines "offset size" as ``tfrecord2idx`` of DALI and of the tfrecord package write them, that is read,
and the head of the first record.

Files are known by their names (``.tfrecord``, ``.tfrecords``, ``.tfrec``, ``x.tfrecord-00000-of-00010``); ``--format
tfrecord`` takes others. An index file counts where each file has one.

Fields are the features of a ``tf.train.Example``: bytes for one value of bytes and a list for several, arrays of
float32 or int64 for numbers. A ``SequenceExample`` has lists of them, a value for each step. Other records are one
field ``data``. No TensorFlow is needed. ``pip install google-crc32c`` (``refill-cache[tfrecord]``) makes the checks
fast: 0.1 s of CPU a GB in place of 50. With it, the client checks each record once more.

Refused: gzip. Tested against tfrecord 1.14.6.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import xxhash

from refill.errors import EmptyDataset, InvalidInput
from refill.formats.tfrecord import kind_of
from refill.protocol.crc32c import crc32c, is_fast, masked
from refill_service.cache_core.dataset_index import RECORD, RecordArray
from refill_service.formats.interface import Listing, Options, Plan, Shard, ShardBytes, ShardReport, Source, records_of
from refill_service.object_store.base import ListedVersion

NAME = "tfrecord"

_NAME = re.compile(r"\.(tfrecords?|tfrec)$|tfrecords?-\d+-of-\d+$|\.tfrecords?-\d+$", re.IGNORECASE)
_INDEX_ENDINGS = (".tfindex", ".idx", ".index")
_HEAD_BYTES = 12
_AROUND_BYTES = 16
_RANGE_BYTES = 8 << 20
_MOST_INDEX_BYTES = 256 << 20
"""Of some ten million records in a file."""
_LOOKED_AT_BYTES = 4096
"""Of the first file, to see what records hold."""
_MOST_FIRST_BYTES = 64 << 20
"""Of its first record, which is read whole where its start may be that of an Example."""
_BATCH = 4096
_GZIP = b"\x1f\x8b"


def found(listing: Listing, options: Options) -> bool:
    return any(_NAME.search(each.key) for each in listing.objects)


async def plan(listing: Listing, source: Source, options: Options) -> Plan:
    files = [each for each in listing.objects if _NAME.search(each.key)]
    if not files:  # named otherwise, and the caller says what they are
        files = [each for each in listing.objects if not each.key.lower().endswith((*_INDEX_ENDINGS, ".json", ".txt"))]
    if not files:
        raise EmptyDataset(f"{listing.url} holds no files of TFRecord")
    first = next((each for each in files if each.size_bytes), files[0])
    holds, head = await _what_it_holds(listing, source, first)
    indexes = [_index_of(listing, each) for each in files]
    about = {"holds": holds}
    said = f"{len(files):,} files of TFRecord with records of {'bytes' if holds == 'bytes' else f'tf.{holds}'}"
    if all(indexes):
        heads = [head if each is first else None for each in files]
        shards = [
            Shard.of(each, (tuple(index or ()), head)) for each, index, head in zip(files, indexes, heads, strict=True)
        ]
        return Plan(f"{said}, and an index beside each", shards, about, False)
    slow = "" if is_fast else "; checking them takes a minute a GB: `pip install google-crc32c` makes that quick"
    return Plan(f"{said}, no index beside them{slow}", [Shard.of(each) for each in files], about, True)


def scan(shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]:
    if shard.about is not None:
        index, head = shard.about
        yield _by_index(shard, data, ListedVersion(*index), head)
        return
    batch: list[tuple[int, int, int]] = []
    stream, place = _Stream(shard.size_bytes, data), 0
    while place < shard.size_bytes:
        hasher = xxhash.xxh3_64()
        if place + _AROUND_BYTES > shard.size_bytes:
            raise data.damaged(f"it ends within a record, after {report.num_samples} whole ones", place)
        head = b"".join(stream.pieces_to(place + _HEAD_BYTES))
        hasher.update(head)
        length = _checked_length(head, shard.size_bytes - place, data, place)
        crc = 0
        for piece in stream.pieces_to(place + _HEAD_BYTES + length):
            hasher.update(piece)
            crc = crc32c(piece, crc)
        tail = b"".join(stream.pieces_to(place + _AROUND_BYTES + length))
        hasher.update(tail)
        if masked(crc) != int.from_bytes(tail, "little"):
            raise data.damaged(f"the checksum of record {report.num_samples}, of {length} bytes, is wrong", place)
        batch.append((place, _AROUND_BYTES + length, hasher.intdigest()))
        report.num_samples += 1
        place += _AROUND_BYTES + length
        if len(batch) == _BATCH:
            yield np.array(batch, dtype=RECORD)
            batch.clear()
    if batch:
        yield np.array(batch, dtype=RECORD)


def _checked_length(head: bytes, left_bytes: int, data: ShardBytes, place: int) -> int:
    """Of the record's data, from its head."""
    length = int.from_bytes(head[:8], "little")
    if masked(crc32c(head[:8])) != int.from_bytes(head[8:12], "little"):
        packed = head.startswith(_GZIP) and place == 0
        raise data.damaged(
            _PACKED if packed else "the checksum of a record's length is wrong: no TFRecord, or damaged", place
        )
    if length + _AROUND_BYTES > left_bytes:
        raise data.damaged(f"a record of {length} bytes runs past the end; was the file cut off?", place)
    return length


_PACKED = "it is compressed by gzip, so its records can't be read by ranges of bytes: decompress it (gunzip) first"


async def _what_it_holds(listing: Listing, source: Source, first: ListedVersion) -> tuple[str, bytes]:
    """As the first record with features says; and the head of the first one. Raises :class:`InvalidInput` for what is
    no TFRecord."""
    start = bytes(await source.read(first, 0, _LOOKED_AT_BYTES))
    head = start[:_HEAD_BYTES]
    where = f"{listing.url}/{first.key}"
    if head.startswith(_GZIP):
        raise InvalidInput(f"{where}: {_PACKED}")
    if len(head) < _HEAD_BYTES or masked(crc32c(head[:8])) != int.from_bytes(head[8:], "little"):
        raise InvalidInput(f"{where} is not a TFRecord file: the checksum of its first length is wrong")
    length = int.from_bytes(head[:8], "little")
    may_hold = kind_of(memoryview(start)[_HEAD_BYTES : _HEAD_BYTES + length], length)
    if may_hold != "bytes" and len(start) - _HEAD_BYTES < length <= _MOST_FIRST_BYTES:
        start = bytes(await source.read(first, 0, _HEAD_BYTES + length))
    holds, place = "", 0
    while place + _HEAD_BYTES <= len(start):
        length = int.from_bytes(start[place : place + 8], "little")
        record = memoryview(start)[place + _HEAD_BYTES : place + _HEAD_BYTES + length]
        if place and len(record) < length:
            break
        kind = kind_of(record, length)
        # One without features says nothing, and one of a context alone is an Example, too.
        if not holds or (holds, kind) == ("Example", "SequenceExample"):
            holds = kind
        place += _AROUND_BYTES + length
    return holds or "bytes", head


def _index_of(listing: Listing, found: ListedVersion) -> ListedVersion | None:
    for stem in (found.key, found.key.rpartition(".")[0]):
        for ending in _INDEX_ENDINGS:
            index = listing.get(stem + ending)
            if index is not None and index.key != found.key:
                return index
    return None


def _by_index(shard: Shard, data: ShardBytes, found: ListedVersion, head: bytes | None) -> RecordArray:
    """:param head: of the first record, where it was read already."""
    index = data.other(found)
    if found.size_bytes > _MOST_INDEX_BYTES:
        raise index.damaged(f"it has {found.size_bytes:,} bytes, and {_MOST_INDEX_BYTES:,} are read of it", 0)
    text = bytes(index.read(0, found.size_bytes)) if found.size_bytes else b""
    words = text.split()
    try:
        if len(words) % 2 or not all(word.isdigit() and len(word) < 19 for word in words):
            raise ValueError
        numbers = np.array(list(map(int, words)), dtype=np.int64).reshape(-1, 2)
    except (ValueError, OverflowError) as error:
        raise index.damaged("it is not a list of lines 'offset size'", 0) from error
    offset, length = numbers[:, 0], numbers[:, 1]
    wrong = np.flatnonzero((offset != np.concatenate([[0], (offset + length)[:-1]])[: len(offset)]) | (length < 16))
    end = int(offset[-1] + length[-1]) if len(offset) else 0
    if len(wrong) or end != shard.size_bytes:
        what = f"line {int(wrong[0]) + 1} does not follow" if len(wrong) else f"it ends at byte {end}"
        raise index.damaged(f"{what}, and {data.source} has {shard.size_bytes}: make the index again (tfrecord2idx)", 0)
    if len(offset):  # it may be of a file that was written anew
        head = bytes(data.read(0, _HEAD_BYTES)) if head is None else head
        if _checked_length(head, shard.size_bytes, data, 0) + _AROUND_BYTES != int(length[0]):
            raise index.damaged("its first line is of another record: make it again (tfrecord2idx)", 0)
    return records_of(offset, length)


class _Stream:
    """The bytes of a shard one after another, by ranges that are read ahead."""

    def __init__(self, size_bytes: int, data: ShardBytes) -> None:
        self._size, self._data = size_bytes, data
        self._place = self._range_start = 0
        self._range = memoryview(b"")

    def pieces_to(self, end: int) -> Iterator[memoryview]:
        while self._place < end:
            if self._place == self._range_start + len(self._range):
                self._range_start = self._place
                self._range = self._data.read(self._place, min(self._size, self._place + _RANGE_BYTES))
            here = self._place - self._range_start
            piece = self._range[here : here + end - self._place]
            self._place += len(piece)
            yield piece
