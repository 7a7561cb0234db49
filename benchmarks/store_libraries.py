"""Which library should move the bytes? boto3 against obstore for s3://, obstore against os.pread for file://.

    python benchmarks/store_libraries.py

Ranged GETs of 0.1, 0.8, 2 and 6 MB, 16 at once, of objects on a ministack server on loopback and of files in the
page cache. The libraries take turns, round by round; the table shows medians, the last column
that of MB/s against the first library of the same round. The server shares the machine with the
clients, so that its CPU time is not in ours, but its cost limits both. Takes less than a minute.
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import obstore
from botocore.config import Config
from obstore.store import LocalStore, S3Store
from s3_server import s3_server

CONCURRENCY = 16
ROUNDS = 5
ROUND_SECONDS = 0.3
SIZES = (100_000, 800_000, 2_000_000, 6_000_000)
OBJECT_BYTES = 64_000_000
OBJECTS = 2

Round = Callable[[list[tuple[str, int, int]]], None]


def main() -> None:
    print(f"machine: {platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    versions = f"boto3 {boto3.__version__}, obstore {obstore.__version__}"
    print(f"{versions}; {CONCURRENCY} GETs at once, medians of {ROUNDS} rounds")
    with tempfile.TemporaryDirectory() as folder:
        with s3_server() as environment:
            measure_s3(environment["AWS_ENDPOINT_URL"])
        measure_files(Path(folder))


def measure_s3(endpoint: str) -> None:
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=endpoint, config=Config(max_pool_connections=CONCURRENCY), **keys)
    for number in range(OBJECTS):
        client.put_object(Bucket="bench", Key=f"o{number}", Body=random.randbytes(OBJECT_BYTES))
    store = S3Store(
        "bench",
        config={
            "access_key_id": "test",
            "secret_access_key": "test",
            "region": "us-east-1",
            "endpoint": endpoint,
            "virtual_hosted_style_request": False,
        },
        client_options={"allow_http": True},
    )
    threads = ThreadPoolExecutor(CONCURRENCY)

    def boto_get(item: tuple[str, int, int]) -> int:
        key, start, end = item
        return len(client.get_object(Bucket="bench", Key=key, Range=f"bytes={start}-{end - 1}")["Body"].read())

    def with_boto(items: list[tuple[str, int, int]]) -> None:
        assert sum(threads.map(boto_get, items)) == sum(end - start for _, start, end in items)

    report("s3://", {"boto3": with_boto, "obstore": asynchronous(lambda item: obstore_get(store, item))})


def measure_files(folder: Path) -> None:
    for number in range(OBJECTS):
        (folder / f"o{number}").write_bytes(random.randbytes(OBJECT_BYTES))
    store = LocalStore(folder)
    threads = ThreadPoolExecutor(CONCURRENCY)

    def pread(key: str, start: int, end: int) -> bytes:
        file = os.open(f"{folder}/{key}", os.O_RDONLY)
        try:
            return os.pread(file, end - start, start)
        finally:
            os.close(file)

    def preadv(key: str, start: int, end: int) -> bytearray:
        file = os.open(f"{folder}/{key}", os.O_RDONLY)
        try:
            buffer = bytearray(end - start)
            os.preadv(file, [buffer], start)
            return buffer
        finally:
            os.close(file)

    report(
        "file://",
        {
            "obstore": asynchronous(lambda item: obstore_get(store, item)),
            "pread": asynchronous(lambda item: asyncio.get_running_loop().run_in_executor(threads, pread, *item)),
            "preadv": asynchronous(lambda item: asyncio.get_running_loop().run_in_executor(threads, preadv, *item)),
        },
    )


def obstore_get(store: Any, item: tuple[str, int, int]) -> Any:
    key, start, end = item
    return obstore.get_range_async(store, key, start=start, end=end)


def asynchronous(get: Callable[[tuple[str, int, int]], Any]) -> Round:
    async def run(items: list[tuple[str, int, int]]) -> None:
        slots = asyncio.Semaphore(CONCURRENCY)

        async def one(item: tuple[str, int, int]) -> int:
            async with slots:
                return len(memoryview(await get(item)))

        assert sum(await asyncio.gather(*map(one, items))) == sum(end - start for _, start, end in items)

    return lambda items: asyncio.run(run(items))


def report(what: str, libraries: dict[str, Round]) -> None:
    first = next(iter(libraries))
    print(f"\n{what:8} {'range':>8} {'library':>8} {'MB/s':>7} {'GETs/s':>7} {'CPU s/GB':>9} {'/ ' + first:>10}")
    for size in SIZES:
        dice = random.Random(size)
        count = requests_for(size, list(libraries.values()), dice)
        rates: dict[str, list[float]] = {name: [] for name in libraries}
        costs: dict[str, list[float]] = {name: [] for name in libraries}
        for _ in range(ROUNDS):
            items = ranges(size, count, dice)
            for name, run in libraries.items():
                seconds, cpu_seconds = timed(run, items)
                rates[name].append(size * count / seconds / 1e6)
                costs[name].append(cpu_seconds / (size * count / 1e9))
        for name in libraries:
            ratios = [mine / base for mine, base in zip(rates[name], rates[first], strict=True)]
            rate = statistics.median(rates[name])
            print(
                f"{'':8} {size / 1e6:5.1f} MB {name:>8} {rate:7.0f} {rate * 1e6 / size:7.0f}"
                f" {statistics.median(costs[name]):9.2f} {statistics.median(ratios):10.2f}"
            )


def requests_for(size: int, libraries: list[Round], dice: random.Random) -> int:
    """So many that a round of the slowest takes about ``ROUND_SECONDS``; warms everything up."""
    count = 2 * CONCURRENCY
    seconds = max(timed(run, ranges(size, count, dice))[0] for run in libraries)
    return max(CONCURRENCY, int(count * ROUND_SECONDS / seconds))


def ranges(size: int, count: int, dice: random.Random) -> list[tuple[str, int, int]]:
    starts = [dice.randrange(OBJECT_BYTES - size) for _ in range(count)]
    return [(f"o{dice.randrange(OBJECTS)}", start, start + size) for start in starts]


def timed(run: Round, items: list[tuple[str, int, int]]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    run(items)
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
