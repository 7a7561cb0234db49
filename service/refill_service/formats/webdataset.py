"""WebDataset: which samples do tars hold? Their headers lie between the samples, so all of it is read, once.

Every ``*.tar`` below the URL is read in ranges of 8 MiB, ``--jobs`` tars at a time, each in a process of its own
(threads of one process where all tars together have less than 256 MB). As in ``webdataset``, directories, links and
files without an extension belong to no sample. A key that comes again later in the same tar is a sample of its own;
``index`` warns of it.

Refused: ``.tar.gz`` and the like; a tar that is cut off (without an end mark), takes more than 1 MiB of headers for one
member, chains them without end, or describes sparse files. Tested against webdataset 1.0.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from refill.errors import EmptyDataset
from refill_service.cache_core.dataset_index import RecordArray
from refill_service.formats.interface import (
    Listing,
    Options,
    Plan,
    Shard,
    ShardBytes,
    ShardReport,
    Source,
    checked_windows,
)
from refill_service.formats.shard_reader import read_shard
from refill_service.formats.tar_windows import read_windows

NAME = "webdataset"


def found(listing: Listing, options: Options) -> bool:
    return bool(listing.named(".tar"))


async def plan(listing: Listing, source: Source, options: Options) -> Plan:
    shards = [Shard.of(each) for each in listing.objects if each.key.endswith(".tar")]
    if not shards:
        raise EmptyDataset(f"{listing.url} holds no .tar")
    if options.windows is None:
        return Plan(f"{len(shards):,} tars", shards, {}, reads_all=True)
    length, stride = checked_windows(*options.windows)
    about = {"windows": [length, stride]}
    shards = [replace(each, about=(length, stride)) for each in shards]
    why = f"{len(shards):,} tars; a sample is {length:,} of a folder in a tar, one each {stride:,}"
    return Plan(why, shards, about, reads_all=True, overlaps=stride < length, passed_over="samples of tars")


def scan(shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]:
    if shard.about is None:
        return read_shard(shard.key, data.source, shard.size_bytes, data.read, report)
    return read_windows(shard.key, data.source, shard.size_bytes, data.read, report, *shard.about)
