"""Token files: where do samples of N tokens lie in flat files of numbers? Arithmetic says it; at most a header is read.

Three kinds, told apart by their first bytes:

- ``.npy`` of numpy: one axis, or two in C order. Then, without ``--tokens``, a sample is a row.
- llm.c and modded-nanogpt: 256 int32, of which the first is 20240520 (uint16 follow) or 20240801 (uint32), and the
  third the number of tokens.
- without a header, as nanoGPT's ``.bin`` and OLMo's ``.npy``: ``--dtype`` says what they hold.

What is left of a file behind its last whole sample is in no sample.

``--tokens N`` says how many make a sample, ``--stride S`` how many lie between the starts of two: ``--tokens 1025
--stride 1024`` is the usual block with its targets. A sample may share tokens only with its neighbours, so S is N/2 or
more. ``index`` counts what is left. The field ``tokens`` is an array of numpy of the file's own type:
``transform=lambda sample: {"tokens": sample["tokens"].astype("int64")}``, as a function of a module, makes it what an
embedding wants. Tested against numpy, and bytes as llm.c writes them.
"""

from __future__ import annotations

import ast
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from refill.errors import EmptyDataset, InvalidInput
from refill.formats.tokens import NUMBER_TYPES
from refill_service.cache_core.dataset_index import RecordArray
from refill_service.formats.interface import Listing, Options, Plan, Shard, ShardBytes, ShardReport, Source, records_of

NAME = "tokens"

_ENDINGS = (".bin", ".npy")
_HEAD_BYTES = 1024
"""Of llm.c, and more than most headers of numpy have."""
_NPY = b"\x93NUMPY"
_MAGIC_BYTES = 8
"""They say whether a file has a header."""
_MOST_NPY_HEADER = 1 << 16
_LLM_C = {20240520: "uint16", 20240801: "uint32"}
_STEP_SAMPLES = 1 << 20
"""So many records are made at once."""


class Blocks(NamedTuple):
    """How a file is cut into samples, in bytes."""

    start: int
    length: int
    stride: int
    num_samples: int
    left_over: int
    """Tokens that are of no sample: behind the last one, and between two."""


class _Content(NamedTuple):
    """What a file says of itself."""

    kind: str
    dtype: str
    start: int
    num_tokens: int
    row_tokens: int | None = None


def found(listing: Listing, options: Options) -> bool:
    """By name it could be anything: only where the caller speaks of tokens."""
    said = options.tokens is not None or options.dtype is not None
    return said and bool(listing.named(*_ENDINGS))


async def plan(listing: Listing, source: Source, options: Options) -> Plan:
    files = listing.named(*_ENDINGS)
    if not files:
        raise EmptyDataset(f"{listing.url} holds no {' and no '.join(_ENDINGS)}")
    first = files[0]
    head = bytes(await source.read(first, 0, _HEAD_BYTES))
    if options.dtype is not None and _has_header(head):
        raise InvalidInput(
            f"{listing.url}/{first.key} has a header that says what it holds, and would come as tokens: leave --dtype "
            f"{options.dtype} out"
        )
    if options.dtype is None and not _has_header(head):
        raise InvalidInput(
            f"{listing.url}/{first.key} has no header that says what it holds (none of numpy, none of llm.c): give "
            f"--dtype, one of {', '.join(NUMBER_TYPES)}; nanoGPT writes uint16"
        )
    if options.dtype is not None and options.dtype not in NUMBER_TYPES:
        raise InvalidInput(f"--dtype must be one of {', '.join(NUMBER_TYPES)}, got {options.dtype!r}")
    content = _content(head, first.size_bytes, options.dtype, _refuse_as_invalid(f"{listing.url}/{first.key}"))
    tokens = content.row_tokens if options.tokens is None else options.tokens
    if tokens is None:
        raise InvalidInput(
            f"{len(files):,} files of tokens ({content.kind}, {content.dtype}): --tokens N says how many make a sample"
        )
    stride = checked_stride(tokens, options.stride)
    about = {"dtype": content.dtype, "tokens": tokens, "stride": stride}
    shards = [Shard.of(each, about | {"kind": content.kind, "rows": content.row_tokens}) for each in files]
    why = f"{len(files):,} files ({content.kind}) of {content.dtype}, {tokens:,} a sample, one each {stride:,}"
    return Plan(
        why,
        shards,
        about,
        False,
        overlaps=stride < tokens,
        passed_over="tokens",
    )


def checked_stride(tokens: int, stride: int | None) -> int:
    """Raises :class:`InvalidInput` for numbers that can't be."""
    stride = tokens if stride is None else stride
    if tokens < 1 or tokens >= 2**31 or stride >= 2**31:
        raise InvalidInput(f"--tokens and --stride must be 1 to 2147483647, got {tokens} and {stride}")
    if 2 * stride < tokens:
        raise InvalidInput(
            f"--stride {stride} is less than half of --tokens {tokens}: a sample may share tokens with the one before "
            f"and the one behind it, and with no other. Give --stride {-(-tokens // 2)} or more"
        )
    return stride


def scan(shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]:
    kind, dtype = shard.about["kind"], shard.about["dtype"]
    if kind == "no header":
        if _has_header(bytes(data.read(0, min(_MAGIC_BYTES, shard.size_bytes)))):
            raise data.damaged("it has a header, and the first file has none: index what is alike in its own folder", 0)
        content = _content(b"", shard.size_bytes, dtype, lambda why: data.damaged(why, 0))
    else:
        head = bytes(data.read(0, min(_HEAD_BYTES, shard.size_bytes)))
        if (more := _npy_header_bytes(head)) > len(head):
            head = bytes(data.read(0, min(more, shard.size_bytes)))
        content = _content(head, shard.size_bytes, None, lambda why: data.damaged(why, 0))
        if (content.kind, content.dtype, content.row_tokens) != (kind, dtype, shard.about["rows"]):
            says = f"it is {content.kind} of {content.dtype}, and the first file is {kind} of {dtype}"
            if content.row_tokens != shard.about["rows"]:
                says += f" with rows of {shard.about['rows']}; this one's have {content.row_tokens}"
            raise data.damaged(f"{says}: index what is alike, in a folder of its own", 0)
    blocks = blocks_of(content.start, content.num_tokens, dtype, shard.about["tokens"], shard.about["stride"])
    if blocks.left_over:
        report.num_passed_over += blocks.left_over
    return records_of_blocks(blocks)


def blocks_of(start: int, num_tokens: int, dtype: str, tokens: int, stride: int) -> Blocks:
    size = np.dtype(dtype).itemsize
    count = (num_tokens - tokens) // stride + 1 if num_tokens >= tokens else 0
    used = (count - 1) * min(stride, tokens) + tokens if count else 0
    return Blocks(start, tokens * size, stride * size, count, num_tokens - used)


def records_of_blocks(blocks: Blocks) -> Iterator[RecordArray]:
    for first in range(0, blocks.num_samples, _STEP_SAMPLES):
        numbers = np.arange(first, min(blocks.num_samples, first + _STEP_SAMPLES), dtype=np.int64)
        yield records_of(blocks.start + numbers * blocks.stride, np.full(len(numbers), blocks.length))


def _has_header(head: bytes) -> bool:
    return head.startswith(_NPY) or (len(head) >= 4 and struct.unpack_from("<i", head)[0] in _LLM_C)


def _content(head: bytes, size_bytes: int, dtype: str | None, refused: Any) -> _Content:
    """:param dtype: of a file without a header; None: it has one.
    :param refused: makes the error of what is wrong.
    """
    if dtype is not None:
        if size_bytes % np.dtype(dtype).itemsize:
            raise refused(f"its {size_bytes} bytes are not a whole number of {dtype}")
        return _Content("no header", dtype, 0, size_bytes // np.dtype(dtype).itemsize)
    if head.startswith(_NPY):
        return _npy(head, size_bytes, refused)
    magic = struct.unpack_from("<i", head)[0] if len(head) >= 4 else None
    if magic not in _LLM_C:
        raise refused("it has no header of numpy or llm.c")
    if len(head) < _HEAD_BYTES:
        raise refused(f"it ends within its header, after {len(head)} bytes")
    num_tokens, dtype = struct.unpack_from("<i", head, 8)[0], _LLM_C[magic]
    if num_tokens < 0 or _HEAD_BYTES + num_tokens * np.dtype(dtype).itemsize != size_bytes:
        raise refused(f"its header says {num_tokens} tokens of {dtype}, and it has {size_bytes} bytes")
    return _Content("llm.c", dtype, _HEAD_BYTES, num_tokens)


def _npy_header_bytes(head: bytes) -> int:
    """How long a header of numpy is, as far as it is one."""
    if not head.startswith(_NPY) or len(head) < 12:
        return 0
    wide = head[6] > 1
    return (12 if wide else 10) + int.from_bytes(head[8 : 12 if wide else 10], "little")


def _npy(head: bytes, size_bytes: int, refused: Any) -> _Content:
    start = _npy_header_bytes(head)
    if head[6:7] not in (b"\1", b"\2", b"\3") or not 10 < start <= min(_MOST_NPY_HEADER, size_bytes, len(head)):
        raise refused("its header of numpy can't be read")
    try:
        said = ast.literal_eval(head[12 if head[6] > 1 else 10 : start].decode("utf-8"))
        dtype, shape, fortran = np.dtype(str(said["descr"])), said["shape"], said["fortran_order"]
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise refused("its header of numpy can't be read") from error
    if dtype.name not in NUMBER_TYPES or dtype.byteorder == ">" or dtype.hasobject:
        raise refused(
            f"it holds {str(said['descr'])[:40]}, and tokens are numbers, little end first: {', '.join(NUMBER_TYPES)}"
        )
    if (
        not isinstance(shape, tuple)
        or len(shape) not in (1, 2)
        or not all(type(each) is int and 0 <= each < 2**62 for each in shape)
        or (len(shape) == 2 and (fortran or not shape[1]))
    ):
        raise refused(
            f"its shape is {str(shape)[:60]}{' in Fortran order' * bool(fortran)}: one axis, or two in C order"
        )
    num_tokens = shape[0] * (shape[1] if len(shape) == 2 else 1)
    if start + num_tokens * dtype.itemsize != size_bytes:
        raise refused(f"its header says {num_tokens} numbers of {dtype.name}, and it has {size_bytes} bytes")
    return _Content("numpy", dtype.name, start, num_tokens, shape[1] if len(shape) == 2 else None)


def _refuse_as_invalid(source: str) -> Any:
    return lambda why: InvalidInput(f"{source}: {why}")
