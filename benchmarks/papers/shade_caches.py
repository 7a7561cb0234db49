"""SHADE Fig. 2, 5, 7 and 9 to 12: how often draws by importance come again, and which cache has them.

    python -m benchmarks.papers.shade_caches [--samples 2000]

Losses are made up as in ``shade.py``. Other caches get the draws of importance sampling as it is; SHADE's own sampler
repeats what its cache has (2.5 or 3 times: the paper does not say how often). NoPFS, of Fig. 11, knows an order that
has each sample once: then nobody reads less than who never evicts, which is CoorDL's cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np
from benchmarks.papers.drawn_orders import DrawnOrders
from benchmarks.papers.known_uses import KnownUses
from benchmarks.papers.lfu import LfuCache
from benchmarks.papers.loop_clock import FetchService, LoopClock
from benchmarks.papers.ordered_reads import OrderedRun, keyed_orders, simulate_orders
from benchmarks.papers.page import Curve, Part, Row, print_rows
from benchmarks.papers.shade import hits_and_distinct

from refill.protocol.importance import rank_scores
from refill_service.cache_core.exact.chunk_caches import EarliestUseCache
from refill_service.cache_core.exact.sample_caches import ImportanceCache, LruCache, NeverEvictCache
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["CACHES", "PARTS", "drawn_trace", "epoch_seconds", "hits_of", "part_of_page"]

PARTS = (0.1, 0.2, 0.25, 0.5, 0.75)
BATCH, EPOCHS, FIRST = 64, 12, 4
CACHES = ("LRU", "LFU", "CoorDL", "batch loss", "MIN")
STORE = LoopClock(svc=FetchService(parallel=1, latency=0.001, size=0, bandwidth=1), h=0.0001)
"""A miss takes 11 times as long as a hit."""


def drawn_trace(num_samples: int, epochs: int = EPOCHS) -> tuple[Int64Array, np.ndarray]:
    """``(positions,)`` samples and their losses, of epochs that are drawn by importance, whatever is in memory."""
    generator = np.random.default_rng(1)
    base, of_epochs = generator.standard_normal(num_samples), generator.standard_normal((epochs, num_samples))
    drawn = DrawnOrders(np.exp(base + 0.5 * of_epochs), 1, seed=0, repetition=1, improving=False)
    samples, losses = [], []
    for epoch in range(epochs):
        traces, (found,) = drawn.draw(epoch, [])
        asked, _ = traces.asked(0, np.arange(traces.length(0)))
        for first in range(0, len(asked), BATCH):
            part = slice(first, first + BATCH)
            drawn.scored(asked[part], rank_scores(found[part]))
        samples.append(asked)
        losses.append(found)
    return np.concatenate(samples), np.concatenate(losses)


def hits_of(cache: str, asked: Int64Array, losses: np.ndarray, capacity: int, num_samples: int) -> np.ndarray:
    """``(positions,)``: which are in memory when they are asked for."""
    if cache == "LFU":
        lfu = LfuCache(capacity)
        return np.array([lfu.asked(sample) for sample in asked.tolist()])
    lengths, uses = np.ones(num_samples, dtype=np.int64), KnownUses(asked, num_samples)
    starts = np.arange(num_samples + 1)
    make: dict[str, Callable[[], LruCache | NeverEvictCache | ImportanceCache | EarliestUseCache]] = {
        "LRU": lambda: LruCache(lengths, capacity),
        "CoorDL": lambda: NeverEvictCache(lengths, capacity),
        "batch loss": lambda: ImportanceCache(lengths, capacity),
        "MIN": lambda: EarliestUseCache(starts, lengths, capacity),
    }
    found, kept = np.zeros(len(asked), dtype=bool), make[cache]()
    for time, sample in enumerate(asked.tolist()):
        found[time] = kept.holds(sample)
        if found[time]:
            kept.used(sample, time, uses)
        else:
            kept.missed(sample, time, uses)
        if isinstance(kept, ImportanceCache) and (time + 1) % BATCH == 0:
            batch = slice(time + 1 - BATCH, time + 1)
            kept.scored(asked[batch], np.full(BATCH, losses[batch].mean()))
    return found


def _multiplicities(asked: Int64Array, num_samples: int, epoch: int) -> tuple[float, float]:
    counts = np.bincount(asked[epoch * num_samples : (epoch + 1) * num_samples], minlength=num_samples)
    return float(np.mean(counts >= 2)), float(np.mean(counts >= 3))


def epoch_seconds(num_samples: int, part: float, eviction: str, repetition: float = 0.0) -> float:
    """Loading alone, of the last epoch; SHADE's, or that of another cache on a uniform order if nothing is repeated."""
    if not repetition:
        run = OrderedRun(num_samples, int(part * num_samples), batch_size=BATCH, eviction=eviction, clock=STORE)
        return list(simulate_orders(run, keyed_orders(run, 3), 3))[-1].run_seconds or 0.0
    generator = np.random.default_rng(1)
    losses = np.exp(generator.standard_normal(num_samples) + 0.5 * generator.standard_normal((6, num_samples)))
    drawn = DrawnOrders(losses, 1, seed=0, repetition=repetition, improving=False)
    run = OrderedRun(num_samples, int(part * num_samples), batch_size=BATCH, eviction=eviction, clock=STORE)
    return list(simulate_orders(run, [], 6, drawn=drawn))[-1].run_seconds or 0.0


def part_of_page(num_samples: int = 2000) -> Part:
    asked, losses = drawn_trace(num_samples)
    rows: list[Row] = []
    for epoch, told in ((0, ".265"), (EPOCHS - 1, ".262, .096")):
        twice, thrice = _multiplicities(asked, num_samples, epoch)
        what = f"epoch {epoch + 1} of {EPOCHS}: samples that come twice or more, three times or more"
        rows.append(Row(what, told, f"{twice:.3f}, {thrice:.3f}", "Fig. 2"))
    lines: dict[str, Sequence[tuple[float, float]]] = {}
    late = slice(FIRST * num_samples, None)
    hits = {
        (cache, part): float(hits_of(cache, asked, losses, int(part * num_samples), num_samples)[late].mean())
        for cache in CACHES
        for part in PARTS
    }
    for cache in CACHES:
        lines[cache] = [(part, hits[cache, part]) for part in PARTS]
        told = {"MIN": "above all others", "CoorDL": ".2 at 20 % (Fig. 12)"}.get(
            cache, "all alike, about the cache's part"
        )
        got = " ".join(f"{hits[cache, part]:.3f}" for part in PARTS)
        rows.append(Row(f"{cache}: hits at 10, 20, 25, 50, 75 %", told, got, "Fig. 5, 7, 12"))
    for repetition in (2.5, 3.0):
        own = [(part, hits_and_distinct(num_samples, part, repetition, EPOCHS, FIRST)[0]) for part in PARTS[:4]]
        lines[f"SHADE, {repetition:g}x"] = own
        got = " ".join(f"{value:.3f}" for _, value in own)
        rows.append(Row(f"SHADE, {repetition:g}x: hits at 10, 20, 25, 50 %", ".725 at 20 %", got, "Fig. 7, 12"))
        rows.append(
            Row(f"SHADE, {repetition:g}x, beside LRU at 10 %", "4.5x", f"{own[0][1] / hits['LRU', 0.1]:.1f}x", "Fig. 7")
        )
    rows += _times(num_samples)
    curve = Curve("shade_hits", "memory, part of the samples", "hits", lines | {"SHADE, paper": [(0.2, 0.725)]})
    return Part("SHADE", f"python -m benchmarks.papers.shade_caches --samples {num_samples}", rows, [curve])


def _times(num_samples: int) -> list[Row]:
    """Of loading alone: what SHADE takes is less by the part that is given for a figure's ratio."""
    rows = []
    shade = {part: epoch_seconds(num_samples, part, "importance", 3.0) for part in (0.1, 0.5, 0.75)}
    of_nopfs = "a cache that knows the order (NoPFS)"
    for own, other, eviction, part, told, where in (
        (0.1, "LRU", "lru", 0.1, "2.3x", "Fig. 9(a)"),
        (0.75, "LRU", "lru", 0.75, "2.7x", "Fig. 9(b)"),
        (0.5, "LRU", "lru", 0.75, "1.14x", "Fig. 9(b)"),
        (0.5, "LRU", "lru", 0.5, "2.5x", "Fig. 10"),
        (0.5, "LRU", "lru", 0.75, "1.7x", "Fig. 10"),
        (0.5, of_nopfs, "never", 0.5, "1.6x", "Fig. 11"),
        (0.75, of_nopfs, "never", 0.75, "2.2x", "Fig. 11"),
    ):
        what = "time to load a minibatch with" if where == "Fig. 10" else "throughput of SHADE beside"
        got = epoch_seconds(num_samples, part, eviction) / shade[own]
        beside = f"{other} at {part:.0%}"
        what += f" {beside}, beside SHADE at {own:.0%}" if where == "Fig. 10" else f" {beside}, with SHADE at {own:.0%}"
        rows.append(Row(f"{what}; loading alone, a miss 11 times a hit", told, f"{got:.1f}x", where))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    print_rows("SHADE's draws, and caches", part_of_page(parser.parse_args().samples).rows)
