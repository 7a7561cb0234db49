"""JSON lines: a sample is a line. Nothing says where lines begin but the lines themselves, so all of it is read, once.

Empty lines are passed over. A line is not parsed here: one that is no JSON is an error of the sample when it is read.

The names of an object are the fields; any other value is the field ``json``. Tested against Python's json.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from refill.errors import EmptyDataset
from refill_service.cache_core.dataset_index import RECORD, RecordArray, sample_checksum
from refill_service.formats.interface import Listing, Options, Plan, Shard, ShardBytes, ShardReport, Source

NAME = "jsonl"

_ENDINGS = (".jsonl", ".ndjson")
_RANGE_BYTES = 8 << 20
_BATCH = 65536


def found(listing: Listing, options: Options) -> bool:
    return bool(listing.named(*_ENDINGS))


async def plan(listing: Listing, source: Source, options: Options) -> Plan:
    files = listing.named(*_ENDINGS) or listing.named(".json")
    if not files:
        raise EmptyDataset(f"{listing.url} holds no {' and no '.join(_ENDINGS)}")
    shards = [Shard.of(each) for each in files]
    return Plan(f"{len(files):,} files of JSON lines", shards, {"version": 1}, True, passed_over="empty lines")


def scan(shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]:
    start, hasher = 0, xxhash.xxh3_64()
    blank = True
    """Of the line that has begun in an earlier range."""
    batch: list[tuple[int, int, int]] = []

    def ended(end: int, checksum: int, is_blank: bool) -> None:
        if is_blank:
            report.num_passed_over += end > start
        else:
            batch.append((start, end - start, checksum))

    for low in range(0, shard.size_bytes, _RANGE_BYTES):
        text = data.read(low, min(shard.size_bytes, low + _RANGE_BYTES))
        if low == 0 and bytes(text[:2]) in (b"\x1f\x8b", b"(\xb5"):
            raise data.damaged(
                "it is compressed, so its lines can't be read by ranges of bytes: decompress it first", 0
            )
        ends = (np.flatnonzero(np.frombuffer(text, np.uint8) == 0x0A) + 1).tolist()
        place = 0
        for end in ends:
            piece = text[place:end]
            is_blank = bytes(piece[:64]).isspace() and bytes(piece).isspace()
            if start == low + place:
                ended(low + end, 0 if is_blank else sample_checksum(piece), is_blank)
            else:
                hasher.update(piece)
                ended(low + end, hasher.intdigest(), blank and is_blank)
            start, place = low + end, end
            if len(batch) >= _BATCH:
                yield np.array(batch, dtype=RECORD)
                batch.clear()
        rest = text[place:]
        if start == low + place:
            hasher, blank = xxhash.xxh3_64(), True
        hasher.update(rest)
        blank = blank and (not len(rest) or bytes(rest).isspace())
    if start < shard.size_bytes:  # the last line has no end
        ended(shard.size_bytes, hasher.intdigest(), blank)
    if batch:
        yield np.array(batch, dtype=RECORD)
