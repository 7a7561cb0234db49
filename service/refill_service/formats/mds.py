"""MosaicML's MDS: where do the samples of its shards lie? A shard's table of offsets says it, one ranged GET.

``index.json`` names shards, columns and how many samples a shard holds; so the table, u32 n | u32 offsets[n + 1], is
its first 4 (n + 2) bytes.

Fields are the columns, with the values of mosaicml-streaming's own reader. Pictures (``jpeg``, ``png``, and lists of
them) are bytes, or arrays with ``decode=True``; those of ``pil`` are arrays. Give the folder that holds ``index.json``:
``train`` and ``val`` are two datasets.

Refused: compressed shards, which are no ranges of samples (write them with ``compression=None``); pickles (``pkl``)
without ``--allow-pickle``; shards with different columns; MDS's sisters for JSON and CSV. Tested against
mosaicml-streaming 0.13.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from refill.errors import InvalidInput
from refill_service.cache_core.dataset_index import RecordArray
from refill_service.formats.interface import (
    INDEX_JSON,
    Listing,
    Options,
    Plan,
    Shard,
    ShardBytes,
    ShardReport,
    Source,
    allowed_pickle,
    index_json,
    named_file,
    offsets_table,
)

NAME = "mds"

_ENCODINGS = frozenset((
    "bytes", "str", "int", "ndarray", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64", "str_int", "str_float", "str_decimal", "pil", "jpeg", "jpeg_array", "jpegarray",
    "png", "list[pil]", "list[jpeg]", "list[png]", "json", "pkl",
))  # fmt: skip
"""All of mosaicml-streaming 0.13."""
_MOST_COLUMNS = 10_000


def found(listing: Listing, options: Options) -> bool:
    return any(each.key.lower().endswith(".mds") or ".mds." in each.key for each in listing.objects)


async def plan(listing: Listing, source: Source, options: Options) -> Plan:
    said, where = await index_json(listing, source, "the shards of an MDS dataset")
    shards_said = said.get("shards")
    if said.get("version") != 2 or not isinstance(shards_said, list) or not shards_said:
        raise InvalidInput(f"{where} is not an index of MDS shards of version 2")
    columns: list[tuple[str, str, int | None]] | None = None
    shards = []
    for number, each in enumerate(shards_said):
        key, num_bytes, samples, of_shard = _shard(each, f"{where}, shard {number}")
        if columns is None:
            columns = _checked_columns(of_shard, where, options)
        elif of_shard != columns:
            raise InvalidInput(
                f"{where}: shard {number} ({key}) has other columns than the first, and a dataset has the same in all: "
                "index what is alike, in a folder of its own"
            )
        there = named_file(listing, key, where)
        if there.size_bytes != num_bytes:
            raise InvalidInput(f"{listing.url}/{key} has {there.size_bytes} bytes, and {where} says {num_bytes}")
        shards.append(Shard.of(there, samples))
    assert columns is not None
    about = {"columns": [list(each) for each in columns]}
    names = ", ".join(f"{name} ({encoding})" for name, encoding, _ in columns[:4]) + ", ..." * (len(columns) > 4)
    why = f"{INDEX_JSON} names {len(shards):,} shards of MosaicML MDS with columns {names}"
    return Plan(why, shards, about, False)


def scan(shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]:
    yield offsets_table(shard, data, int(shard.about))


def _shard(said: Any, where: str) -> tuple[str, int, int, list[tuple[str, str, int | None]]]:
    """``(key, bytes, samples, columns)``."""
    if not isinstance(said, dict) or not isinstance(said.get("format"), str):
        raise InvalidInput(f"{where}: its description is not that of a shard")
    if said["format"] != "mds":
        raise InvalidInput(
            f"{where}: it is of format {said['format'][:40]!r}, and only mds is read in place: write it anew by "
            "MDSWriter"
        )
    if said.get("compression") or said.get("zip_data"):
        raise InvalidInput(
            f"{where}: it is compressed ({str(said.get('compression'))[:40]}), so that its samples are no "
            "ranges of bytes. Write it anew without, by MDSWriter(compression=None)"
        )
    raw, samples = said.get("raw_data"), said.get("samples")
    key, num_bytes = (raw.get("basename"), raw.get("bytes")) if isinstance(raw, dict) else (None, None)
    lists = [said.get(f"column_{what}") for what in ("names", "encodings", "sizes")]
    if (
        not isinstance(key, str)
        or type(num_bytes) is not int
        or type(samples) is not int
        or not 0 <= samples < 2**32
        or not all(isinstance(each, list) for each in lists)
        or len({len(each or ()) for each in lists}) != 1
    ):
        raise InvalidInput(f"{where}: its description is not that of a shard")
    columns = []
    for name, encoding, size in zip(*(each or () for each in lists), strict=True):
        if not isinstance(name, str) or not isinstance(encoding, str) or (size is not None and type(size) is not int):
            raise InvalidInput(f"{where}: the description of its columns is wrong")
        columns.append((name, encoding, size))
    return key.replace("\\", "/"), num_bytes, samples, columns


def _checked_columns(
    columns: list[tuple[str, str, int | None]], where: str, options: Options
) -> list[tuple[str, str, int | None]]:
    for name, encoding, size in columns:
        if encoding == "pkl":
            allowed_pickle(options, f"{where}: column {name[:60]!r}", "json, ndarray or bytes")
        if encoding.partition(":")[0] not in _ENCODINGS:
            raise InvalidInput(f"{where}: refill doesn't know the encoding {encoding[:60]!r} of column {name[:60]!r}")
        if size is not None and not 0 <= size < 2**32:
            raise InvalidInput(f"{where}: column {name[:60]!r} can't have {size} bytes")
    if len({name for name, _, _ in columns}) != len(columns) or not columns or len(columns) > _MOST_COLUMNS:
        raise InvalidInput(f"{where}: it names no columns, too many, or one of them twice")
    return columns
