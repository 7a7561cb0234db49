"""How much do batches of samples of one length pad and read, with memory for 5 and 10 % of the dataset, beside lhotse?

    python benchmarks/length_buckets.py

Lengths are those of speech: 1 to 35 s, as LibriSpeech has them, about log-normal below a hard end. refill's orders are
planned, with no I/O. lhotse's DynamicBucketingSampler reads its cuts in the order in which they are stored, and has as
many of them in its buffer as refill has in memory; where lhotse is not installed, its rows are left out. Counts only.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator

import numpy as np
from class_reads import ClassRun, simulate_classes

from refill.protocol.class_order import bucket_boundaries
from refill_service.cache_core.sample_mapping import Int64Array
from refill_service.planning.plan_measures import spread

MILLISECONDS = 1000


def speech(num_samples: int, seed: int) -> Int64Array:
    """Milliseconds of each sample: two kinds of utterances, short ones and ones cut at some 15 s."""
    random = np.random.default_rng(seed)
    short = random.lognormal(np.log(4), 0.6, num_samples)
    long = random.normal(14.5, 1.3, num_samples)
    seconds = np.where(random.random(num_samples) < 0.35, short, long)
    return (np.clip(seconds, 1, 35) * MILLISECONDS).astype(np.int64)


def of_lhotse(widths: Int64Array, buffer: int, batch: int, buckets: int, seed: int) -> tuple[float, float, float]:
    """``(padding, distance, co-batch)`` of an epoch."""
    from lhotse import CutSet
    from lhotse.dataset.sampling import DynamicBucketingSampler
    from lhotse.testing.dummies import dummy_cut

    def cuts() -> Iterator[object]:
        for number, width in enumerate(widths.tolist()):
            yield dummy_cut(number, duration=width / MILLISECONDS)

    sampler = DynamicBucketingSampler(
        CutSet.from_cuts(cuts()),
        max_cuts=batch,
        num_buckets=buckets,
        shuffle=True,
        buffer_size=buffer,
        num_cuts_for_bins_estimate=min(10_000, len(widths)),
        seed=seed,
    )
    order, taken, filled = list[int](), 0, 0
    for cut_set in sampler:
        ids = [int(cut.id.rpartition("-")[2]) for cut in cut_set]
        order += ids
        taken, filled = taken + int(widths[ids].sum()), filled + len(ids) * int(widths[ids].max())
    assert sorted(order) == list(range(len(widths))), "not each sample came once"
    place_of = np.empty(len(widths), dtype=np.int64)
    place_of[order] = np.arange(len(widths))
    return 1 - taken / filled, *spread(place_of, np.array([0, len(widths)]), batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=38_400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--buckets", type=int, nargs="+", default=[10, 30])
    parser.add_argument("--memory", type=float, nargs="+", default=[0.05, 0.1], help="parts of the dataset")
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[8, 16])
    args = parser.parse_args()
    widths = speech(args.samples, 0)
    print("| buckets, memory | loader | padding | bytes | GETs for 64 | distance | co-batch |")
    print("| --- " * 7 + "|")

    def row(what: str, loader: str, padding: float, rest: str) -> None:
        print(f"| {what} | {loader} | {padding:.1%} | {rest} |", flush=True)

    run = ClassRun(int(args.memory[-1] * args.samples), "random", args.chunk_sizes[0], 1, args.batch)
    found = simulate_classes(np.zeros(args.samples, np.int64), run, widths)
    row("none", "refill", found.padding, f"{found.read_amplification:.2f}x | - | - | -")
    for buckets in args.buckets:
        classes = np.searchsorted(bucket_boundaries(widths, buckets), widths, side="right")
        for memory in args.memory:
            what = f"{buckets}, {memory:.0%}"
            for chunk_size in args.chunk_sizes:
                run = ClassRun(int(memory * args.samples), "buckets", chunk_size, 1, args.batch)
                found = simulate_classes(classes, run, widths)
                assert not found.missing
                rest = f"{found.read_amplification:.2f}x | {found.gets * 64 / args.samples:.1f} "
                rest += f"| {found.distance:.3f} | {found.co_batch:.2f}"
                row(what, f"refill, K = {chunk_size}", found.padding, rest)
            if importlib.util.find_spec("lhotse") is not None:
                padding, distance, co_batch = of_lhotse(widths, int(memory * args.samples), args.batch, buckets, seed=1)
                row(what, "lhotse", padding, f"1.00x | - | {distance:.3f} | {co_batch:.2f}")


if __name__ == "__main__":
    main()
