"""Megatron-LM's ``.bin`` and ``.idx``: where do sequences, or blocks of N tokens, lie? No byte of a ``.bin`` is read.

An ``.idx`` has ``MMIDIDX\\0\\0``, version u64 = 1, dtype u8, sequences u64, documents u64, then lengths i32[sequences]
(tokens), pointers i64[sequences] (bytes of the ``.bin``), documents i64[...], and perhaps modes i8[sequences].

Without ``--tokens``, a sample is a sequence, as ``IndexedDataset`` has it, and all lengths and pointers are read. With
it, 42 bytes of the ``.idx`` are read, and samples are blocks of the tokens as they lie there, across sequences and
documents: the tokens that ``GPTDataset`` gives, not its samples, since it shuffles documents before it cuts.

Tested against megatron-core 0.19.2.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import numpy as np

from refill.errors import EmptyDataset, InvalidInput, SampleDamaged
from refill_service.cache_core.dataset_index import RecordArray
from refill_service.formats.interface import Listing, Options, Plan, Shard, ShardBytes, ShardReport, Source, records_of
from refill_service.formats.tokens import blocks_of, checked_stride, records_of_blocks
from refill_service.object_store.base import ListedVersion

NAME = "megatron"

_MAGIC = b"MMIDIDX\0\0"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16",
}  # fmt: skip
_STEP = 1 << 18
"""Sequences of which lengths and pointers are read at once."""


def found(listing: Listing, options: Options) -> bool:
    return bool(_pairs(listing))


async def plan(listing: Listing, source: Source, options: Options) -> Plan:
    if options.dtype is not None:
        raise InvalidInput("--dtype is for files that don't say it, and Megatron's .idx does")
    pairs = _pairs(listing)
    if not pairs:
        raise EmptyDataset(f"{listing.url} holds no .bin with an .idx of the same name beside it")
    if options.tokens is None and options.stride is not None:
        raise InvalidInput("--stride needs --tokens: without it a sample is a sequence as it was written")
    stride = None if options.tokens is None else checked_stride(options.tokens, options.stride)
    first = listing.get(pairs[0])
    assert first is not None
    head = bytes(await source.read(first, 0, _HEAD.size))
    dtype, _ = _checked_head(head, first.size_bytes, lambda why: InvalidInput(f"{listing.url}/{first.key}: {why}"))
    about = {"dtype": dtype, "tokens": options.tokens, "stride": stride}
    shards = []
    for key in pairs:
        idx, tokens = listing.get(key), listing.get(_bin_of(key))
        assert idx is not None
        assert tokens is not None
        shards.append(Shard.of(tokens, about | {"idx": tuple(idx), "head": head if idx is first else None}))
    each = "a sequence each" if options.tokens is None else f"{options.tokens:,} tokens, one each {stride:,}"
    why = f"{len(pairs):,} pairs of .bin and .idx (Megatron-LM) of {dtype}, samples of {each}"
    if lone := _lone(listing):
        why += f"; {len(lone):,} .bin and .idx without the other are left out, such as {lone[0]}"
    overlaps = stride is not None and options.tokens is not None and stride < options.tokens
    return Plan(why, shards, about, False, overlaps=overlaps, passed_over="tokens")


def scan(shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]:
    idx, about = ListedVersion(*shard.about["idx"]), shard.about
    index = data.other(idx)

    def damaged(why: str) -> SampleDamaged:
        return index.damaged(why, 0)

    head = about["head"] or bytes(index.read(0, min(_HEAD.size, idx.size_bytes)))
    dtype, sequences = _checked_head(head, idx.size_bytes, damaged)
    if dtype != about["dtype"]:
        raise damaged(
            f"it says {dtype}, and the first file says {about['dtype']}: index what is alike, in its own folder"
        )
    size = np.dtype(dtype).itemsize
    if shard.size_bytes % size:
        raise data.damaged(f"its {shard.size_bytes} bytes are not a whole number of {dtype}", 0)
    if about["tokens"] is None:
        return _sequences(shard, index, sequences, size)
    if sequences:  # else it is of another file, or one of them is cut
        at = _HEAD.size + 12 * sequences - 8
        last = int.from_bytes(index.read(at, at + 8), "little", signed=True)
        if not 0 <= last <= shard.size_bytes:
            raise index.damaged(f"its last sequence begins at byte {last} of {shard.size_bytes} of the .bin", at)
    blocks = blocks_of(0, shard.size_bytes // size, dtype, about["tokens"], about["stride"])
    report.num_passed_over += blocks.left_over
    return records_of_blocks(blocks)


def _sequences(shard: Shard, index: ShardBytes, sequences: int, size: int) -> Iterator[RecordArray]:
    end = 0
    for first in range(0, sequences, _STEP):
        count = min(_STEP, sequences - first)
        at = _HEAD.size + 4 * first
        lengths = np.frombuffer(index.read(at, at + 4 * count), "<i4").astype(np.int64) * size
        at = _HEAD.size + 4 * sequences + 8 * first
        pointers = np.frombuffer(index.read(at, at + 8 * count), "<i8").astype(np.int64)
        ends = pointers + np.maximum(lengths, 0)
        before = np.concatenate([[end], ends[:-1]])
        wrong = (lengths < 0) | (pointers < before) | (pointers > shard.size_bytes) | (ends > shard.size_bytes)
        if wrong.any():
            place = int(np.flatnonzero(wrong)[0])
            lies = f"at byte {int(pointers[place])} with {int(lengths[place])} bytes"
            why = f"sequence {first + place} can't lie {lies} in a .bin of {shard.size_bytes}"
            raise index.damaged(why, at + 8 * place)
        end = int(ends[-1])
        yield records_of(pointers, lengths)


def _pairs(listing: Listing) -> list[str]:
    return [each.key for each in listing.objects if each.key.endswith(".idx") and listing.get(_bin_of(each.key))]


def _lone(listing: Listing) -> list[str]:
    """What has half of a pair's name."""
    keys = {each.key for each in listing.objects}
    other = {".bin": ".idx", ".idx": ".bin"}
    return sorted(key for key in keys if key[-4:] in other and key[:-4] + other[key[-4:]] not in keys)


def _bin_of(idx: str) -> str:
    return f"{idx[:-4]}.bin"


def _checked_head(head: bytes, size_bytes: int, refused: Callable[[str], Exception]) -> tuple[str, int]:
    """``(dtype, sequences)``; :param refused: makes the error of what is wrong."""
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise refused("it is not an index of Megatron-LM (MMIDIDX)")
    _, version, code, sequences, documents = _HEAD.unpack(head)
    if version != 1:
        raise refused(f"it is an index of Megatron-LM of version {version}, and version 1 is read")
    if code not in _DTYPES:
        raise refused(f"it names an unknown type of numbers, {code}")
    least = _HEAD.size + 12 * sequences + 8 * documents
    if least not in (size_bytes, size_bytes - sequences):
        raise refused(f"of {sequences} sequences and {documents} documents it has {least} bytes, and not {size_bytes}")
    return _DTYPES[code], sequences
