"""What do the bytes of a dataset's index mean?

The index is one object beside the blobs. All integers are little-endian:

    header    128 bytes: magic "REFILLIX" | version u32 | record_bytes u32 | block_samples u32 | flags u32
              | num_samples u64 | num_blobs u64 | sample_bytes u64 | metadata_bytes u64 | names_bytes u64
              | fingerprint u64 | metadata_checksum u64 | blobs_checksum u64 | etags_bytes u64 | reserved u64[3]
              | header_checksum u64
    metadata  JSON object, UTF-8
    blobs     size_bytes i64[num_blobs] | first_sample i64[num_blobs + 1] | name_ends i64[num_blobs]
              | names, UTF-8, one after another
              | with ETAGS: etag_ends i64[num_blobs] | ETags, ASCII, one after another; an empty one is not known
    blocks    of ``block_samples`` records (the last may hold fewer), each followed by its checksum u64

A record is (offset, length, checksum of the sample): 16 bytes where all offsets and lengths fit in 32 bits, else
24. Every block lies where arithmetic says, so the records of any range of samples are one ranged GET. Checksums
are xxh3_64; that of a block is seeded with the fingerprint plus the block's number, so that a block of another
index, or out of place, is noticed. The fingerprint covers names and sizes of blobs, and records: equal means the same
dataset, for all that an index can say. ETags are left out of it, so that a copy elsewhere is the same dataset.

Flags:

- NO_CHECKSUMS: a record is (offset, length), 8 or 16 bytes, and pods compare a sample with what it was at their first
  read of it (``refill index --checksums first-read``).
- ETAGS: pods read a blob only as long as it has the ETag that it had when it was indexed.
- OVERLAPS: a sample may share bytes with the one before and the one behind it, and with no other.
- ELSEWHERE: the blobs do not lie beside the index, but below the URL that the metadata has as ``data``.

Samples are numbered over the blobs in the order of the table, and within a blob in the order of their offsets.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np
import xxhash
from numpy.typing import NDArray

from refill.errors import IndexDamaged, IndexVersionUnsupported, InvalidInput

Buffer = bytes | bytearray | memoryview
Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]

INDEX_KEY = "refill.index"
"""Name of the index beside the blobs."""
_FINGERPRINT = re.compile("[0-9a-f]{16}")
KEPT_KEY = re.compile(rf"refill\.(index|column\.[\w.-]+)\.{_FINGERPRINT.pattern}")
"""Of what belongs to one version of a dataset."""
INDEX_VERSION = 3
"""The only one that is read."""
BLOCK_SAMPLES = 4096
"""64 KiB of records at 16 bytes each: worth a request, and little waste at the ends of a range."""
CHECKSUM_BYTES = 8

_MAGIC = b"REFILLIX"
_HEADER = struct.Struct("<8sIIII9Q24xQ")
HEADER_BYTES = _HEADER.size

_NARROW = np.dtype([("offset", "<u4"), ("length", "<u4"), ("checksum", "<u8")])
RECORD = np.dtype([("offset", "<i8"), ("length", "<i8"), ("checksum", "<u8")])
"""As they are found and written, and where a blob has 4 GiB or more as they lie there."""
RecordArray = NDArray[np.void]
"""Records of dtype :data:`RECORD`, in the order of their offsets."""
_LAYOUTS = {
    True: {_NARROW.itemsize: _NARROW, RECORD.itemsize: RECORD},
    False: {8: np.dtype(_NARROW.descr[:2]), 16: np.dtype(RECORD.descr[:2])},
}
"""By whether there are checksums, and by size."""

_NO_CHECKSUMS, _ETAGS, _OVERLAPS, _ELSEWHERE = 1, 2, 4, 8
_ALL_FLAGS = 15
_MOST_URL_LETTERS = 2048
MOST_ETAG_LETTERS = 200
"""S3's have 34 to 40. A longer one is not kept, for each of many objects."""
_ETAG = re.compile(rb"[\x21-\x7e]*")

MAX_METADATA_BYTES = 4 << 20
"""JSON takes tens of times as much once it is read. The names of 100,000 classes fit."""
MAX_HEAD_BYTES = 1 << 31
_MAX_BLOCK_SAMPLES = 1 << 20
_MAX_NESTING = 32
_STEP_SAMPLES = 1 << 18
"""Checked at once, so that checking takes little memory."""


def kept_key(key: str, fingerprint: int) -> str:
    """Where the index of an earlier version of a dataset stays when ``refill index --append`` has made
    another: jobs that began with it go on by it."""
    return f"{key}.{fingerprint:016x}"


def column_key(name: str, fingerprint: int) -> str:
    """Where a column of a version of a dataset lies."""
    return kept_key(f"refill.column.{name}", fingerprint)


def is_fingerprint(text: str) -> bool:
    """Whether somebody's word may be a fingerprint, 16 digits of base 16."""
    return _FINGERPRINT.fullmatch(text) is not None


def is_kept_key(key: str) -> bool:
    """Whether an object belongs to one version of a dataset: an index of an earlier one, or a column."""
    return KEPT_KEY.fullmatch(key) is not None


sample_checksum: Callable[[Buffer], int] = xxhash.xxh3_64_intdigest
"""Of a sample's bytes."""


class BlobNames(Sequence[str]):
    """Names decoded one at a time: a list of a million strings would take more memory than all the rest."""

    def __init__(self, text: bytes, ends: Int64Array) -> None:
        self._text = text
        self._ends = ends

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        start = int(self._ends[place - 1]) if place else 0
        return self._text[start : int(self._ends[place])].decode()

    def __len__(self) -> int:
        return len(self._ends)


@dataclass(frozen=True)
class BlobTable:
    """The blobs of a dataset, in the order of their samples."""

    names: Sequence[str]
    """Keys relative to the dataset's URL, ``num_blobs`` of them."""
    first_sample: Int64Array
    """Shape ``(num_blobs + 1,)``: id of each blob's first sample; last the number of samples."""
    size_bytes: Int64Array
    """Shape ``(num_blobs,)``."""
    etags: Sequence[str] | None = None
    """That blobs had when they were indexed, ``""`` where that is not known; None: of none of them."""

    def etag_of(self, blob: int) -> str | None:
        return None if self.etags is None else self.etags[blob] or None

    def __len__(self) -> int:
        return len(self.size_bytes)

    def blob_of(self, sample: int) -> int:
        """The blob that holds a sample; blobs without samples are passed over."""
        return int(np.searchsorted(self.first_sample, sample, side="right")) - 1


@dataclass(frozen=True)
class SampleRecords:
    """Where samples ``[first_sample, first_sample + len)`` lie, and what their bytes must be. Arrays of that length."""

    first_sample: int
    offset: Int64Array
    """Of the sample's first byte in its blob."""
    length: Int64Array
    checksum: UInt64Array
    """xxh3_64 of the sample's bytes."""
    has_checksums: bool = True
    """False: nobody knows them yet, and those here mean nothing."""

    def __len__(self) -> int:
        return len(self.offset)

    @property
    def end_sample(self) -> int:
        return self.first_sample + len(self)

    def place(self, sample: int) -> int:
        """Of a sample in the arrays."""
        return sample - self.first_sample

    def places(self, samples: Int64Array) -> Int64Array:
        """The same of samples ``(n,)``."""
        return samples - self.first_sample

    def ids(self, start: int, stop: int) -> Int64Array:
        """The samples at places ``start <= place < stop``."""
        return np.arange(start, stop, dtype=np.int64) + self.first_sample

    def covers(self, first: int, end: int) -> bool:
        """Whether all samples ``[first, end)`` are there."""
        return self.first_sample <= first and end <= self.end_sample

    def between(self, start: int, stop: int) -> SampleRecords:
        """Those at places ``start <= place < stop``, as views."""
        return self.part(self.first_sample + start, self.first_sample + stop)

    def part(self, first: int, end: int) -> SampleRecords:
        """The records of samples ``[first, end)``, by id, as views."""
        if not self.first_sample <= first <= end <= self.end_sample:
            raise InvalidInput(f"samples {first}-{end} are not within {self.first_sample}-{self.end_sample}")
        here = slice(first - self.first_sample, end - self.first_sample)
        return SampleRecords(first, self.offset[here], self.length[here], self.checksum[here], self.has_checksums)


class CheckedRecords(Protocol):
    """What :meth:`DatasetIndex.check_records` needs to know of records. Samples ascend."""

    @property
    def offset(self) -> Int64Array: ...
    @property
    def length(self) -> Int64Array: ...
    def __len__(self) -> int: ...
    def ids(self, start: int, stop: int) -> Int64Array: ...


@dataclass(frozen=True)
class IndexHeader:
    """The head of an index, which says how large everything else in it is. ``source`` names the index in errors."""

    source: str
    num_samples: int
    num_blobs: int
    sample_bytes: int
    metadata_bytes: int
    names_bytes: int
    record_bytes: int
    block_samples: int
    fingerprint: int
    metadata_checksum: int
    blobs_checksum: int
    flags: int = 0
    etags_bytes: int = 0

    @property
    def has_checksums(self) -> bool:
        return not self.flags & _NO_CHECKSUMS

    @property
    def has_etags(self) -> bool:
        return bool(self.flags & _ETAGS)

    @property
    def overlaps(self) -> bool:
        return bool(self.flags & _OVERLAPS)

    @property
    def is_elsewhere(self) -> bool:
        return bool(self.flags & _ELSEWHERE)

    @property
    def blobs_bytes(self) -> int:
        of_etags = 8 * self.num_blobs + self.etags_bytes if self.has_etags else 0
        return 8 * (3 * self.num_blobs + 1) + self.names_bytes + of_etags

    @property
    def head_bytes(self) -> int:
        """Header, metadata and blobs: what must be read to open a dataset."""
        return HEADER_BYTES + self.metadata_bytes + self.blobs_bytes

    @property
    def num_blocks(self) -> int:
        return -(-self.num_samples // self.block_samples)

    @property
    def block_bytes(self) -> int:
        """Of a full block with its checksum."""
        return self.block_samples * self.record_bytes + CHECKSUM_BYTES

    @property
    def index_bytes(self) -> int:
        return self.head_bytes + self.num_samples * self.record_bytes + self.num_blocks * CHECKSUM_BYTES


@dataclass(frozen=True)
class DatasetIndex:
    """A dataset's index without its records: head, blobs, metadata."""

    header: IndexHeader
    blobs: BlobTable
    metadata: dict[str, Any]
    """What ``pack`` or ``index`` noted: ``made_by``, ``classes``, ``seed``, ..."""

    @property
    def num_samples(self) -> int:
        return self.header.num_samples

    @property
    def sample_bytes(self) -> int:
        """All samples together."""
        return self.header.sample_bytes

    @property
    def fingerprint(self) -> int:
        return self.header.fingerprint

    @property
    def data_url(self) -> str | None:
        """Below which the blobs lie, as whoever wrote the index says; None: beside the index."""
        return self.metadata["data"] if self.header.is_elsewhere else None

    def check_records(self, records: CheckedRecords) -> None:
        """Whether samples lie one after another within their blobs. Raises :class:`IndexDamaged` that names one.

        What is read, and how much of it, follows from these numbers.
        """
        header, blobs = self.header, self.blobs
        for low in range(0, len(records), _STEP_SAMPLES):
            here = slice(max(0, low - 2), min(low + _STEP_SAMPLES, len(records)))
            offset, length = records.offset[here], records.length[here]
            samples = records.ids(here.start, here.stop)
            blob = np.searchsorted(blobs.first_sample, samples, side="right") - 1
            wrong = (offset < 0) | (length < 0) | (offset > blobs.size_bytes[blob] - length)
            ends, same = offset + length, blob[1:] == blob[:-1]
            if header.overlaps:
                # With a neighbour alone, so that samples never take more than twice the bytes that they lie in.
                wrong[1:] |= same & ((offset[1:] < offset[:-1]) | (ends[1:] < ends[:-1]))
                wrong[2:] |= (blob[2:] == blob[:-2]) & (offset[2:] < ends[:-2])
            else:
                wrong[1:] |= same & (offset[1:] < ends[:-1])
            if wrong.any():
                place = int(np.flatnonzero(wrong)[0])
                lies = f"at byte {int(offset[place])} with {int(length[place])} bytes"
                why = f"sample {int(samples[place])} can't lie {lies}"
                raise _damaged(header.source, "records", header.head_bytes, header.index_bytes, why)
        if int(records.length.sum()) > header.sample_bytes:
            raise _damaged(
                header.source, "header", 0, HEADER_BYTES, f"samples have more than {header.sample_bytes} bytes"
            )

    def records_range(self, first: int, end: int) -> tuple[int, int]:
        """Bytes ``[start, end)`` of the index with the whole blocks that hold samples ``[first, end)``."""
        header = self.header
        if not 0 <= first <= end <= header.num_samples:
            raise InvalidInput(f"{header.source}: samples {first}-{end} are not within 0-{header.num_samples}")
        if first == end:
            return header.head_bytes, header.head_bytes
        first_block = first // header.block_samples
        end_block = -(-end // header.block_samples)
        stop = min(header.head_bytes + end_block * header.block_bytes, header.index_bytes)
        return header.head_bytes + first_block * header.block_bytes, stop

    def decode_records(self, blocks: Buffer, first: int, end: int) -> SampleRecords:
        """Records of samples ``[first, end)`` from the bytes of :meth:`records_range`, each block verified.

        Raises :class:`IndexDamaged` that names the block and its bytes.
        """
        header = self.header
        start, stop = self.records_range(first, end)
        view = memoryview(blocks)
        if len(view) != stop - start:
            raise _damaged(header.source, "records", start, stop, f"{len(view)} bytes in place of {stop - start}")
        layout = _LAYOUTS[header.has_checksums][header.record_bytes]
        first_block = first // header.block_samples
        columns = np.empty(end - first, dtype=layout)
        for place in range(0, len(view), header.block_bytes):
            block = first_block + place // header.block_bytes
            stored = view[place : place + header.block_bytes]
            body = stored[:-CHECKSUM_BYTES]
            if _block_checksum(body, header.fingerprint, block) != int.from_bytes(stored[-CHECKSUM_BYTES:], "little"):
                raise _damaged(
                    header.source, f"block {block} of records", start + place, start + place + len(stored), "checksum"
                )
            records = np.frombuffer(body, dtype=layout)
            block_first = block * header.block_samples
            low, high = max(first, block_first), min(end, block_first + len(records))
            columns[low - first : high - first] = records[low - block_first : high - block_first]
        return SampleRecords(
            first,
            columns["offset"].astype(np.int64),
            columns["length"].astype(np.int64),
            columns["checksum"].astype(np.uint64) if header.has_checksums else np.zeros(end - first, np.uint64),
            header.has_checksums,
        )


def decode_header(data: Buffer, source: str, object_bytes: int | None = None) -> IndexHeader:
    """The header, from the first bytes of the index.

    :param source: the URL of the index, for errors.
    :param object_bytes: size of the stored object, if known; another one than the header says is damage.

    Raises :class:`IndexVersionUnsupported`, or :class:`IndexDamaged` with section and byte range.
    """
    head = bytes(memoryview(data)[:HEADER_BYTES])
    if not head.startswith(_MAGIC):
        raise _damaged(source, "header", 0, min(len(head), len(_MAGIC)), "it does not start as an index of refill does")
    version = int.from_bytes(head[8:12], "little")
    if len(head) >= 12 and version != INDEX_VERSION:
        raise IndexVersionUnsupported(
            f"{source} has version {version} of the index, and this refill reads version {INDEX_VERSION}: make the"
            " index again (refill index --force), pack the dataset again, or use the refill that wrote it",
            index=source,
            version=version,
        )
    if len(head) < HEADER_BYTES:
        raise _damaged(source, "header", 0, HEADER_BYTES, f"it ends at byte {len(head)}")
    (
        _, _, record_bytes, block_samples, flags, num_samples, num_blobs, sample_bytes, metadata_bytes, names_bytes,
        fingerprint, metadata_checksum, blobs_checksum, etags_bytes, header_checksum,
    ) = _HEADER.unpack(head)  # fmt: skip
    if xxhash.xxh3_64_intdigest(head[:-CHECKSUM_BYTES]) != header_checksum:
        raise _damaged(source, "header", 0, HEADER_BYTES, "checksum")
    header = IndexHeader(
        source, num_samples, num_blobs, sample_bytes, metadata_bytes, names_bytes, record_bytes, block_samples,
        fingerprint, metadata_checksum, blobs_checksum, flags, etags_bytes,
    )  # fmt: skip
    # The checksum is right, so only a faulty writer gets here; it must not make us allocate what it says.
    if (
        header.flags & ~_ALL_FLAGS
        or record_bytes not in _LAYOUTS[header.has_checksums]
        or (header.etags_bytes and not header.has_etags)
        or not 1 <= block_samples <= _MAX_BLOCK_SAMPLES
        or max(num_samples, num_blobs, sample_bytes) >= 2**62
    ):
        raise _damaged(source, "header", 0, HEADER_BYTES, "its sizes can't be")
    if metadata_bytes > MAX_METADATA_BYTES:
        why = f"it announces {metadata_bytes} bytes of metadata, and {MAX_METADATA_BYTES} are allowed"
        raise _damaged(source, "header", 0, HEADER_BYTES, why)
    if header.head_bytes > MAX_HEAD_BYTES:
        raise _damaged(source, "header", 0, HEADER_BYTES, f"it announces {header.head_bytes} bytes of blob names")
    if object_bytes is not None and object_bytes != header.index_bytes:
        low, high = sorted((object_bytes, header.index_bytes))
        what = "truncated" if object_bytes < header.index_bytes else "followed by bytes that are not its own"
        raise _damaged(source, _section_at(header, low), low, high, f"{what}: {object_bytes} bytes in the store")
    return header


def decode_index(header: IndexHeader, sections: Buffer) -> DatasetIndex:
    """Metadata and blob table, from bytes ``[HEADER_BYTES, header.head_bytes)`` of the index.

    Raises :class:`IndexDamaged` with section and byte range.
    """
    view = memoryview(sections)
    blobs_start = HEADER_BYTES + header.metadata_bytes
    if len(view) < header.head_bytes - HEADER_BYTES:
        end = HEADER_BYTES + len(view)
        raise _damaged(header.source, _section_at(header, end), end, header.head_bytes, "truncated")
    metadata = bytes(view[: header.metadata_bytes])
    if xxhash.xxh3_64_intdigest(metadata) != header.metadata_checksum:
        raise _damaged(header.source, "metadata", HEADER_BYTES, blobs_start, "checksum")
    table = view[header.metadata_bytes : header.metadata_bytes + header.blobs_bytes]  # of millions of blobs: no copy
    if xxhash.xxh3_64_intdigest(table) != header.blobs_checksum:
        raise _damaged(header.source, "blob table", blobs_start, header.head_bytes, "checksum")
    count = header.num_blobs
    numbers = np.frombuffer(table, dtype="<i8", count=3 * count + 1).astype(np.int64)
    size_bytes, first_sample, name_ends = numbers[:count], numbers[count : 2 * count + 1], numbers[2 * count + 1 :]
    if (
        int(first_sample[0]) != 0
        or int(first_sample[-1]) != header.num_samples
        # Not by differences, which may be too large for 64 bits.
        or bool((first_sample[1:] < first_sample[:-1]).any())
        or bool((name_ends[1:] <= name_ends[:-1]).any())
        or (count > 0 and int(name_ends[0]) <= 0)
        or (int(name_ends[-1]) if count else 0) != header.names_bytes
        or bool(((size_bytes < 0) | (size_bytes >= 2**62)).any())
        or float(size_bytes.sum(dtype=np.float64)) * (1 + 1e-9) * (1 + header.overlaps) < header.sample_bytes
    ):
        raise _damaged(header.source, "blob table", blobs_start, header.head_bytes, "its numbers contradict each other")
    names_start = 8 * (3 * count + 1)
    text = bytes(table[names_start : names_start + header.names_bytes])
    try:
        text.decode()
        starts = np.frombuffer(text, dtype=np.uint8)[name_ends[:-1]] if count else np.empty(0, np.uint8)
        if bool(((starts & 0xC0) == 0x80).any()):
            raise ValueError("a name begins within a letter")
    except ValueError as error:
        raise _damaged(header.source, "blob table", blobs_start, header.head_bytes, "names are not UTF-8") from error
    etags = _decoded_etags(header, table[names_start + header.names_bytes :], blobs_start)
    decoded = _decoded_metadata(header, metadata)
    names = BlobNames(text, name_ends)
    return DatasetIndex(header, BlobTable(names, first_sample, size_bytes, etags), decoded)


def _decoded_etags(header: IndexHeader, table: memoryview, blobs_start: int) -> BlobNames | None:
    """They go into the headers of requests: letters without spaces, and few of them."""
    if not header.has_etags:
        return None
    ends = np.frombuffer(table, dtype="<i8", count=header.num_blobs).astype(np.int64)
    text = bytes(table[8 * header.num_blobs :])
    if (
        bool((ends[1:] < ends[:-1]).any())
        or (header.num_blobs > 0 and int(ends[0]) < 0)
        or (int(ends[-1]) if header.num_blobs else 0) != header.etags_bytes
        or bool((np.diff(ends, prepend=0) > MOST_ETAG_LETTERS).any())
        or not _ETAG.fullmatch(text)
    ):
        raise _damaged(header.source, "blob table", blobs_start, header.head_bytes, "its ETags can't be")
    return BlobNames(text, ends)


def _decoded_metadata(header: IndexHeader, metadata: bytes) -> dict[str, Any]:
    """What clients get to see again: an object that JSON can say, and that is not nested without end."""
    try:
        decoded = json.loads(metadata)
        if not isinstance(decoded, dict) or _nesting(decoded) > _MAX_NESTING:
            raise ValueError("not an object of names and values")
        json.dumps(decoded, ensure_ascii=False, allow_nan=False).encode()
        data = decoded.get("data")
        if header.is_elsewhere and not (isinstance(data, str) and 0 < len(data) <= _MOST_URL_LETTERS):
            raise ValueError("no URL of the data")
    except (ValueError, RecursionError) as error:
        end = HEADER_BYTES + header.metadata_bytes
        raise _damaged(header.source, "metadata", HEADER_BYTES, end, "not a JSON object") from error
    return decoded


def _nesting(value: Any, most: int = _MAX_NESTING) -> int:
    """How deep objects and lists are nested, as far as ``most`` and one more."""
    if most < 0 or not isinstance(value, (dict, list)):
        return 0
    return 1 + max(
        (_nesting(each, most - 1) for each in (value.values() if isinstance(value, dict) else value)), default=0
    )


def encode_head(
    blobs: BlobTable,
    *,
    sample_bytes: int,
    fingerprint: int,
    wide: bool,
    metadata: dict[str, Any],
    has_checksums: bool = True,
    overlaps: bool = False,
    data_url: str | None = None,
) -> tuple[IndexHeader, bytes]:
    """Header, metadata and blob table of an index whose blocks follow.

    ``wide``: whether a record needs 64-bit offsets, that is, whether a blob has 4 GiB or more.
    """
    flags = _OVERLAPS * overlaps | _NO_CHECKSUMS * (not has_checksums) | _ETAGS * (blobs.etags is not None)
    if data_url is not None:
        flags, metadata = flags | _ELSEWHERE, metadata | {"data": data_url}
    encoded = [name.encode() for name in blobs.names]
    names = b"".join(encoded)
    name_ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    table = b"".join(
        np.ascontiguousarray(column, dtype="<i8").tobytes()
        for column in (blobs.size_bytes, blobs.first_sample, name_ends)
    )
    table += names
    etags = b""
    if blobs.etags is not None:
        letters = [etag.encode("ascii") for etag in blobs.etags]
        etags = b"".join(letters)
        table += np.cumsum([len(each) for each in letters], dtype="<i8").astype("<i8").tobytes() + etags
    text = json.dumps(metadata, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
    if len(text) > MAX_METADATA_BYTES:
        raise InvalidInput(f"metadata takes {len(text):,} bytes, and an index holds {MAX_METADATA_BYTES:,}; name less")
    header = IndexHeader(
        source="",
        num_samples=int(blobs.first_sample[-1]),
        num_blobs=len(blobs),
        sample_bytes=sample_bytes,
        metadata_bytes=len(text),
        names_bytes=len(names),
        record_bytes=_layout(wide=wide, has_checksums=has_checksums).itemsize,
        block_samples=BLOCK_SAMPLES,
        fingerprint=fingerprint,
        metadata_checksum=xxhash.xxh3_64_intdigest(text),
        blobs_checksum=xxhash.xxh3_64_intdigest(table),
        flags=flags,
        etags_bytes=len(etags),
    )
    packed = _HEADER.pack(
        _MAGIC, INDEX_VERSION, header.record_bytes, header.block_samples, flags, header.num_samples,
        header.num_blobs, header.sample_bytes, header.metadata_bytes, header.names_bytes, header.fingerprint,
        header.metadata_checksum, header.blobs_checksum, header.etags_bytes, 0,
    )  # fmt: skip
    packed = packed[:-CHECKSUM_BYTES]
    packed += xxhash.xxh3_64_intdigest(packed).to_bytes(CHECKSUM_BYTES, "little")
    return header, packed + text + table


def encode_block(records: SampleRecords, *, block: int, fingerprint: int, wide: bool) -> bytes:
    """One block, with its checksum. All blocks but the last hold ``BLOCK_SAMPLES`` records."""
    columns = np.empty(len(records), dtype=_layout(wide=wide, has_checksums=records.has_checksums))
    columns["offset"] = records.offset
    columns["length"] = records.length
    if records.has_checksums:
        columns["checksum"] = records.checksum
    body = columns.tobytes()
    return body + _block_checksum(body, fingerprint, block).to_bytes(CHECKSUM_BYTES, "little")


def _layout(*, wide: bool, has_checksums: bool) -> np.dtype[Any]:
    return _LAYOUTS[has_checksums][(16 if wide else 8) + 8 * has_checksums]


def fingerprint_of_blobs(blobs: BlobTable) -> xxhash.xxh3_64:
    """A hash fed with the blobs' sizes and names; feed it all records, then its digest is the fingerprint."""
    hasher = xxhash.xxh3_64()
    for name, size in zip(blobs.names, blobs.size_bytes.tolist(), strict=True):
        hasher.update(f"{size} {name}\n".encode())
    return hasher


def _block_checksum(body: Buffer, fingerprint: int, block: int) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=(fingerprint + block) % 2**64)


def _section_at(header: IndexHeader, place: int) -> str:
    for section, end in (
        ("header", HEADER_BYTES),
        ("metadata", HEADER_BYTES + header.metadata_bytes),
        ("blob table", header.head_bytes),
        ("records", header.index_bytes),
    ):
        if place < end:
            return section
    return "end"


def _damaged(source: str, section: str, start: int, end: int, why: str) -> IndexDamaged:
    why = "its checksum is wrong" if why == "checksum" else why
    return IndexDamaged(
        f"{source} is damaged in its {section}, bytes {start}-{end}: {why}; make the index again",
        index=source,
        section=section,
        start=start,
        end=end,
    )
