"""WebDataset: which samples do tars hold? Their headers lie between the samples, so all of it is read, once."""

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
