"""What does it cost a pod to decode rows of Parquet and Arrow, and a client to read one? ``make bench-rows``.

Kinds of rows as training sets have them are written by pyarrow, and decoded as pods do: from the bytes of a group to
its rows. CPU is that of this process, in seconds for each GB (1e9 bytes) of rows. A row on the wire is held against an
Arrow stream of one row, and JSON with base64.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from machine import machine

from refill.formats import parser_of
from refill_service.formats import arrow, parquet
from refill_service.formats.interface import Listing, Options, ShardReport
from refill_service.object_store.base import ListedVersion

LEAST_SECONDS = 1.0
GROUP_BYTES = 30_000_000


class MemoryShard:
    """The same, for ``scan``."""

    def __init__(self, data: bytes) -> None:
        self.source, self._data = "x", memoryview(data)

    def read(self, start: int, end: int) -> memoryview:
        return self._data[start:end]


class Bytes:
    """A file in memory, for ``plan``."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    async def read(self, found: ListedVersion, start: int, end: int) -> memoryview:
        return self._data[start:end]


def tables() -> dict[str, pa.Table]:
    draws = np.random.default_rng(1)

    def images(num_bytes: int) -> pa.Table:
        count = GROUP_BYTES // num_bytes
        pictures = [{"bytes": draws.bytes(num_bytes), "path": f"{place}.jpg"} for place in range(count)]
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        return pa.table({"image": pa.array(pictures, kind), "label": pa.array(range(count), pa.int64())})

    words = np.array([draws.bytes(int(size)).hex() for size in draws.integers(1, 6, 20_000)])
    texts = [" ".join(words[draws.integers(0, len(words), 300)]) for _ in range(GROUP_BYTES // 2200)]
    tokens = [draws.integers(0, 50_000, 512, dtype=np.int32) for _ in range(GROUP_BYTES // 2048)]
    small = GROUP_BYTES // 40
    return {
        "pictures of 100 kB": images(100_000),
        "pictures of 10 kB": images(10_000),
        "text of 2 kB, id, url": pa.table(
            {"text": texts, "id": range(len(texts)), "url": [f"https://x/{place}" for place in range(len(texts))]}
        ),
        "512 tokens of int32": pa.table({"ids": pa.array(tokens, pa.list_(pa.int32()))}),
        "six numbers": pa.table({f"n{place}": draws.random(small) for place in range(6)}),
    }


def cpu_of(work: Callable[[], object]) -> float:
    """Seconds each time."""
    started, count = time.process_time(), 0
    while time.process_time() - started < LEAST_SECONDS:
        work()
        count += 1
    return (time.process_time() - started) / count


def written(table: pa.Table, kind: str) -> bytes:
    out = io.BytesIO()
    if kind == "arrow":
        with pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table.combine_chunks())
    else:
        pq.write_table(table, out, row_group_size=len(table), compression=kind, use_dictionary=False)
    return out.getvalue()


def rows_of(data: bytes, kind: str) -> tuple[Callable[[], bytes], dict[str, Any], np.ndarray[Any, Any]]:
    """What decodes the first group, what its parser is told, and where each row of it ends."""
    format_ = arrow if kind == "arrow" else parquet
    key = f"x.{format_.NAME}"
    listing, report = Listing("x", [ListedVersion(key, len(data), "e")]), ShardReport()
    shard = MemoryShard(data)
    plan = asyncio.run(format_.plan(listing, Bytes(data), Options(checksums="all")))
    records = np.concatenate(list(format_.scan(plan.shards[0], shard, report)))

    async def read(start: int, end: int) -> memoryview:
        return shard.read(start, end)

    def decode() -> bytes:
        group = asyncio.run(format_.group(report.parts[0][0][1:], plan.about, read, {}))
        pieces = [shard.read(start, end) for start, end in group.ranges]
        return b"".join(block.data for block in group.decode(pieces))

    offset: Any = records["offset"]  # else mypy tries all that + may be, for a second
    return decode, {"format": {"name": format_.NAME} | plan.about}, offset + records["length"]


def main() -> None:
    print(f"{machine()}, numpy {np.__version__}, pyarrow {pa.__version__}")
    print(f"{'rows':24}{'file':>10}{'a row':>10}{'pod, CPU s/GB':>15}{'pod, us a row':>15}")
    wire: dict[str, tuple[pa.Table, list[memoryview], Any]] = {}
    for name, table in tables().items():
        for kind in ("none", "snappy", "zstd", "arrow"):
            decode, about, ends = rows_of(written(table, kind), kind)
            rows = memoryview(decode())
            seconds = cpu_of(decode)
            each = len(rows) / len(table)
            of_gb, of_row = seconds / len(rows) * 1e9, seconds / len(table) * 1e6
            print(f"{name:24}{kind:>10}{each:>8.0f} B{of_gb:>15.2f}{of_row:>15.2f}")
        starts = np.concatenate([[0], ends[:-1]])
        cut = [rows[start:end] for start, end in zip(starts[:1000].tolist(), ends[:1000].tolist(), strict=True)]
        wire[name] = table, cut, parser_of(about)
    print(f"\n{'a row at the client, us':24}{'ours':>10}{'as JSON':>10}{'as Arrow':>10}")
    for name, (table, cut, parse) in wire.items():
        some = table.slice(0, len(cut))
        texts = [json.dumps(row, default=lambda data: base64.b64encode(data).decode()) for row in some.to_pylist()]
        streams = [written(some.slice(place, 1), "arrow") for place in range(len(some))]

        def ours(cut: list[memoryview] = cut, parse: Any = parse) -> None:
            for row in cut:
                parse(row, 0)

        def as_json(texts: list[str] = texts, binary: bool = "pictures" in name) -> None:
            for text in texts:
                row = json.loads(text)
                if binary:
                    base64.b64decode(row["image"]["bytes"])

        def as_arrow(streams: list[bytes] = streams) -> None:
            for stream in streams:
                pa.ipc.open_stream(stream).read_all().to_pylist()

        times = [cpu_of(work) / len(cut) * 1e6 for work in (ours, as_json, as_arrow)]
        print(f"{name:24}" + "".join(f"{each:>10.1f}" for each in times))


if __name__ == "__main__":
    main()
