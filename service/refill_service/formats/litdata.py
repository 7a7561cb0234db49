"""LitData: where do the items of its chunks lie? A chunk's table of offsets says it, one ranged GET.

``index.json`` names chunks, and what the leaves of an item are. A chunk begins with u32 n | u32 offsets[n + 1]. Chunks
of ``TokensLoader`` are tokens behind that table: blocks of ``--tokens``, and nothing is read.

Fields are named by the way to a leaf: ``image``, ``meta.id``, ``0`` in a tuple, ``data`` where a sample is one leaf.
Tensors are arrays of numpy; video, audio, meshes, PDF and other media are the bytes of their files.

Refused: compressed and encrypted chunks; pickles (litdata pickles ``None``, too) without ``--allow-pickle``; graphs;
and rows that litdata stores as Arrow: those of text, numbers, bytes, lists and dicts alone. Tested against litdata
0.2.76.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from refill.errors import InvalidInput
from refill.formats.litdata import LITDATA_MEDIA, LITDATA_NUMPY, LITDATA_TORCH
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
    refuse_options,
)
from refill_service.formats.tokens import blocks_of, checked_stride, records_of_blocks

NAME = "litdata"

_KINDS = frozenset(
    ("str", "text", "bool", "int", "float", "bytes", "pil", "jpeg", "jpeg_array", "numpy", "tensor", "no_header_numpy",
     "no_header_tensor", "json", "pickle", *LITDATA_MEDIA)
)  # fmt: skip
_MOST_LEAVES = 10_000
_ARROW = (
    "its rows are stored as Arrow (as litdata does with text, lists and dicts alone), and can't be read by ranges of "
    "bytes: "
    "write them as JSON lines, which refill index reads"
)


def found(listing: Listing, options: Options) -> bool:
    chunks = [each for each in listing.named(".bin") if each.key.rpartition("/")[2].startswith("chunk-")]
    return bool(chunks) and listing.get(INDEX_JSON) is not None


async def plan(listing: Listing, source: Source, options: Options) -> Plan:
    said, where = await index_json(listing, source, "the chunks of a LitData dataset")
    chunks, config = said.get("chunks"), said.get("config")
    if not isinstance(chunks, list) or not chunks or not isinstance(config, dict):
        raise InvalidInput(f"{where} is not an index of LitData's chunks")
    _refuse_unreadable(config, where)
    kinds = config.get("data_format")
    if not isinstance(kinds, list) or not all(isinstance(each, str) for each in kinds) or len(kinds) > _MOST_LEAVES:
        raise InvalidInput(f"{where}: data_format is not a list of names")
    loader = config.get("item_loader")
    if loader not in ("PyTreeLoader", "TokensLoader"):
        raise InvalidInput(f"{where}: refill doesn't know the item loader {str(loader)[:60]!r}")
    if loader == "TokensLoader":
        return _tokens(listing, chunks, kinds, options, where)
    refuse_options(NAME, options)
    leaves = list(zip(_names(config, where), kinds, strict=True))
    for leaf, kind in leaves:
        _check(leaf, kind, where, options)
    about = {"leaves": [list(each) for each in leaves]}
    shards = [Shard.of(*_chunk(listing, each, where)[:2]) for each in chunks]
    few = ", ".join(f"{name} ({kind})" for name, kind in leaves[:4]) + ", ..." * (len(leaves) > 4)
    return Plan(f"{INDEX_JSON} names {len(shards):,} chunks of LitData with leaves {few}", shards, about, False)


def scan(shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]:
    if not isinstance(shard.about, dict):
        yield offsets_table(shard, data, int(shard.about), _ARROW)
        return
    about = shard.about
    size = np.dtype(about["dtype"]).itemsize
    start = 4 * (about["items"] + 2)
    if start + about["dim"] * size > shard.size_bytes:
        raise data.damaged(f"it has no room for the {about['dim']} tokens that it should hold", start)
    blocks = blocks_of(start, about["dim"], about["dtype"], about["tokens"], about["stride"])
    report.num_passed_over += blocks.left_over
    yield from records_of_blocks(blocks)


def _refuse_unreadable(config: dict[str, Any], where: str) -> None:
    if config.get("compression"):
        raise InvalidInput(
            f"{where}: chunks are compressed ({str(config['compression'])[:40]}), so that items are no ranges of "
            "bytes. Write them anew without compression"
        )
    if config.get("encryption"):
        raise InvalidInput(f"{where}: chunks are encrypted, and pods have no keys. Write them again without encryption")
    if config.get("ipc_compression"):
        raise InvalidInput(f"{where}: {_ARROW}")


def _chunk(listing: Listing, said: Any, where: str) -> tuple[Any, int, Any]:
    """``(object, items, tokens)``."""
    key, num_bytes, items = (
        [said.get(name) for name in ("filename", "chunk_bytes", "chunk_size")] if isinstance(said, dict) else [None] * 3
    )
    if not isinstance(key, str) or type(items) is not int or not 0 <= items < 2**32 or type(num_bytes) is not int:
        raise InvalidInput(f"{where}: the description of a chunk is wrong")
    return named_file(listing, key, where), items, said.get("dim")


def _tokens(listing: Listing, chunks: list[Any], kinds: list[str], options: Options, where: str) -> Plan:
    if options.dtype is not None:
        raise InvalidInput("--dtype is for files that don't say it, and LitData's index does")
    name, _, number = kinds[0].partition(":") if kinds else ("", "", "")
    types = {"no_header_numpy": LITDATA_NUMPY, "no_header_tensor": LITDATA_TORCH}.get(name, {})
    dtype = types.get(int(number)) if number.isdigit() and len(number) < 4 else None
    if dtype is None or dtype == "bool":
        raise InvalidInput(f"{where}: chunks of tokens can't be of {str(kinds)[:60]}")
    if options.tokens is None:
        raise InvalidInput(f"{where}: chunks of tokens, {dtype}: --tokens N says how many make a sample (block_size)")
    stride = checked_stride(options.tokens, options.stride)
    about = {"dtype": dtype, "tokens": options.tokens, "stride": stride}
    shards = []
    for each in chunks:
        there, items, dim = _chunk(listing, each, where)
        if type(dim) is not int or not 0 <= dim < 2**40:
            raise InvalidInput(f"{where}: it does not say how many tokens {there.key} has")
        shards.append(Shard.of(there, about | {"items": items, "dim": dim}))
    why = f"{INDEX_JSON} names {len(shards):,} chunks of LitData's tokens, {dtype}, {options.tokens:,} a sample"
    overlaps = stride < options.tokens
    return Plan(why, shards, about, False, reads_none=True, overlaps=overlaps, passed_over="tokens")


def _check(leaf: str, kind: str, where: str, options: Options) -> None:
    name, _, more = kind.partition(":")
    if name == "pickle":
        allowed_pickle(
            options, f"{where}: leaf {leaf[:60]!r}", "numpy, tensor, json or bytes (litdata pickles None, too)"
        )
    types = {"no_header_numpy": LITDATA_NUMPY, "no_header_tensor": LITDATA_TORCH}.get(name)
    if name not in _KINDS or (types is not None and (not more.isdigit() or int(more[:4]) not in types)):
        raise InvalidInput(
            f"{where}: refill doesn't know leaves of kind {kind[:60]!r}, as {leaf[:60]!r} is; write it as bytes"
        )


def _names(config: dict[str, Any], where: str) -> list[str]:
    """Of leaves, in their order: the way to each through dicts, lists and tuples."""
    try:
        _, spec = json.loads(str(config.get("data_spec")))
        names = list(_ways(spec, (), 0))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise InvalidInput(f"{where}: data_spec describes no tree of dicts, lists and tuples: {error}") from error
    if len(names) != len(config["data_format"]) or len(set(names)) != len(names):
        raise InvalidInput(f"{where}: data_spec has {len(names)} leaves, and data_format {len(config['data_format'])}")
    return names


def _ways(spec: Any, above: tuple[str, ...], depth: int) -> Iterator[str]:
    kind, children = spec["type"], spec["children_spec"]
    if kind is None:
        yield ".".join(above) or "data"
        return
    if depth > 32 or kind not in ("builtins.dict", "builtins.list", "builtins.tuple"):
        raise ValueError(f"it has {str(kind)[:60]}, {depth} deep")
    keys = json.loads(spec["context"]) if kind == "builtins.dict" else [str(each) for each in range(len(children))]
    for key, child in zip(keys, children, strict=True):
        yield from _ways(child, (*above, str(key)), depth + 1)
