"""How much faster do ``refill pack`` and ``refill index`` work on all cores? The commands as users give them.

    python benchmarks/pack_cores.py
    python benchmarks/pack_cores.py --megabytes 2000 --jobs 1 4 8

A folder of files is packed into another one, and the tars are indexed anew, with each number of jobs: with 1 as it was
before there were processes. What comes out must be the same, byte by byte. Rounds alternate; medians; start included.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from machine import machine

from refill_service.num_cores import num_cores

SAMPLE_BYTES = (3_000, 100_000)
_IN_FOLDER = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=500, help="of files, for each size (default: 500)")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, num_cores() + 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    args = parser.parse_args()
    print(f"{machine()}; {args.megabytes} MB of files; medians of {args.rounds} rounds; a folder as store")
    print(f"{'':24} {'jobs':>5} {'seconds':>8} {'MB/s':>7} {'CPU s':>7} {'times as fast':>14}")
    for size in SAMPLE_BYTES:
        with tempfile.TemporaryDirectory(prefix="refill-bench-", dir=args.folder) as folder:
            _measure(Path(folder), size, args)


def _measure(folder: Path, size: int, args: argparse.Namespace) -> None:
    source = folder / "files"
    for number in range(args.megabytes * 1_000_000 // size):
        path = source / f"{number // _IN_FOLDER:06}" / f"{number:09}.bin"
        if number % _IN_FOLDER == 0:
            path.parent.mkdir(parents=True)
        path.write_bytes(os.urandom(size))
    took: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    digests = set()
    for _ in range(args.rounds):
        for jobs in args.jobs:
            shutil.rmtree(folder / "out", ignore_errors=True)
            took["pack", jobs].append(_timed("pack", source, folder / "out", jobs))
            digests.add(_digest(folder / "out"))
            took["index", jobs].append(_timed("index", folder / "out", None, jobs))
            digests.add(_digest(folder / "out", but="refill.index"))
    if len(digests) != 2:
        raise SystemExit("what came out differs between numbers of jobs")
    for what in ("pack", "index"):
        first = None
        for jobs in args.jobs:
            seconds, cpu = (statistics.median(each) for each in zip(*took[what, jobs], strict=True))
            first = first or seconds
            rate = args.megabytes / seconds
            name = f"{what}, {size:,} bytes each"
            print(f"{name:24} {jobs:5} {seconds:8.1f} {rate:7.0f} {cpu:7.1f} {first / seconds:13.2f}x", flush=True)


def _timed(command: str, where: Path, to: Path | None, jobs: int) -> tuple[float, float]:
    """Seconds, and CPU seconds of all its processes."""
    arguments = [command, str(where), *([str(to)] if to else []), "--quiet", "--force", "--jobs", str(jobs)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "refill_service.cli", *arguments], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _digest(folder: Path, but: str = "") -> str:
    digest = hashlib.blake2b()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode())
        if path.name != but:
            digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
