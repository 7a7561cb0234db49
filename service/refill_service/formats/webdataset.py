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
    refuse_options,
)
from refill_service.formats.shard_reader import read_shard

NAME = "webdataset"


def found(listing: Listing, options: Options) -> str | None:
    tars = listing.named(".tar")
    return f"{len(tars):,} tars" if tars else None


async def plan(listing: Listing, source: Source, options: Options) -> Plan:
    refuse_options(NAME, options)
    shards = [Shard.of(each) for each in listing.objects if each.key.endswith(".tar")]
    if not shards:
        raise EmptyDataset(f"{listing.url} holds no .tar")
    return Plan(f"{len(shards):,} tars", shards, {}, reads_all=True)


def scan(shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]:
    return read_shard(shard.key, data.source, shard.size_bytes, data.read, report)
