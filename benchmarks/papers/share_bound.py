"""What do several pods read more than one with the memory of all? By policy, and the least that is possible.

    python -m benchmarks.papers.share_bound [--samples 24000] [--chunk-size 64] [--pods 1 3 5]

Each pod has its own chunks and its own part of memory, so that one may be short of it while another has some to spare.
The bound says how many GETs are left to whoever decides what stays and has to return each sample in the order asked,
even with all that is to come known. It is the Lagrangian one: memory has a price in each part of an epoch; with prices
given, the cheapest schedule of each chunk is found exactly, and what all of them cost together, less the price of the
memory that there is, no policy can go below. Prices are raised where these schedules hold too much, and lowered where
they hold little, so that the bound is good after some rounds, and right after any.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from benchmarks.machine import machine
from numpy.typing import NDArray

from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array
from refill_service.planning.listed_orders import dealt
from refill_service.planning.simulated_job import SimulatedJob, SimulatedPods

__all__ = ["ChunkUses", "bound_of", "bound_of_pods", "gets_of", "random_orders"]

Floats = NDArray[np.float64]

EPOCHS = 3
_PRICES = 64
"""Of each epoch."""
_ROUNDS = 120
_BATCH = 256
_FIRST_STEP, _LAST_STEP = 0.5, 0.02
"""By which prices follow what is held, in relation to memory."""


@dataclass(frozen=True)
class ChunkUses:
    """Of some chunks, all of as many uses."""

    times: Int64Array
    """``(chunks, uses)``, ascending."""
    before: Int64Array
    """``(chunks, uses)`` when the sample of each was used before; -1: never."""
    end: int
    """All times are before it."""

    @classmethod
    def of(cls, orders: Sequence[Int64Array], chunk_size: int) -> ChunkUses:
        """Of all chunks, if each order has every sample once, and chunks are all as large."""
        num_samples = len(orders[0])
        times = np.stack([number * num_samples + np.argsort(order) for number, order in enumerate(orders)], axis=1)
        before = np.concatenate([np.full((num_samples, 1), -1), times[:, :-1]], axis=1)
        shape = (num_samples // chunk_size, chunk_size * len(orders))
        by_time = np.argsort(times.reshape(shape), axis=1)
        in_chunks, before = (np.take_along_axis(each.reshape(shape), by_time, axis=1) for each in (times, before))
        return cls(in_chunks, before, num_samples * len(orders))

    def some(self, first: int, end: int) -> ChunkUses:
        return ChunkUses(self.times[first:end], self.before[first:end], self.end)


def bound_of(uses: ChunkUses, memory_samples: float, num_epochs: int = EPOCHS, rounds: int = _ROUNDS) -> float:
    """GETs that no cache with so much memory, beside the chunk in hand, gets by with."""
    edges = np.linspace(0, uses.end, _PRICES * num_epochs + 1)
    # To begin with, to hold a sample for a fifth of an epoch costs a GET.
    prices = np.full(len(edges) - 1, 1 / (0.2 * uses.end / num_epochs))
    best = 0.0
    for number in range(rounds):
        paid = np.concatenate([[0.0], np.cumsum(prices * np.diff(edges))])
        cost, held = _cheapest(uses, edges, paid)
        best = max(best, cost - memory_samples * paid[-1])
        step = _FIRST_STEP * (_LAST_STEP / _FIRST_STEP) ** (number / rounds)
        prices *= np.exp(step * np.clip(held / memory_samples - 1, -1, 1))
    return best


def _cheapest(uses: ChunkUses, edges: Floats, paid: Floats) -> tuple[float, Floats]:
    """What the cheapest schedules of all chunks cost, and how many samples they hold on average between two edges.

    :param paid: ``(edges,)`` what a sample pays that is held from the start to there.
    """
    at, since = (np.interp(each, edges, paid) for each in (uses.times, uses.before))
    num_chunks, num_uses = at.shape
    cheapest = np.zeros((num_chunks, num_uses + 1))
    """From a GET at each use on, that GET included."""
    next_get = np.empty((num_chunks, num_uses), dtype=np.int64)
    for use in range(num_uses - 1, -1, -1):
        holding = at[:, use + 1 :] - np.maximum(at[:, use, None], since[:, use + 1 :])
        costs = cheapest[:, use + 1 :].copy()
        costs[:, 1:] += np.cumsum(holding, axis=1)
        choice = np.argmin(costs, axis=1)
        cheapest[:, use] = 1 + costs[np.arange(num_chunks), choice]
        next_get[:, use] = use + 1 + choice
    return float(cheapest[:, 0].sum()), _held(uses, next_get, edges)


def _held(uses: ChunkUses, next_get: Int64Array, edges: Floats) -> Floats:
    """Samples held on average between two edges."""
    num_chunks, num_uses = uses.times.shape
    get_of = np.zeros((num_chunks, num_uses), dtype=np.int64)
    """The GET that serves each use."""
    chunks, here = np.arange(num_chunks), np.zeros(num_chunks, dtype=np.int64)
    while len(chunks):
        get_of[chunks, here] = here
        here = next_get[chunks, here]
        chunks, here = chunks[here < num_uses], here[here < num_uses]
    get_of = np.maximum.accumulate(get_of, axis=1)
    since = np.maximum(np.take_along_axis(uses.times, get_of, axis=1), uses.before)
    # What has been held up to each edge, all intervals together: of each, its part before the edge.
    starts, ends = np.sort(since, axis=None), np.sort(uses.times, axis=None)

    def before_edges(times: Int64Array) -> Floats:
        sums = np.concatenate([[0.0], np.cumsum(times, dtype=np.float64)])
        count = np.searchsorted(times, edges)
        found: Floats = count * edges - sums[count]
        return found

    total: Floats = np.diff(before_edges(starts) - before_edges(ends)) / np.diff(edges)
    return total


def random_orders(num_samples: int, num_epochs: int = EPOCHS, seed: int = 0) -> list[Int64Array]:
    generator = np.random.default_rng([seed, num_samples])
    return [generator.permutation(num_samples).astype(np.int64) for _ in range(num_epochs)]


def bound_of_pods(
    orders: Sequence[Int64Array], chunk_size: int, memory_samples: int, num_pods: int, rounds: int = _ROUNDS
) -> float:
    """The same of pods that divide chunks and memory as those of a live policy do."""
    num_samples, uses = len(orders[0]), ChunkUses.of(orders, chunk_size)
    bounds = ChunkLayout(np.array([0, num_samples]), chunk_size).owner_bounds(num_pods) // chunk_size
    return sum(
        bound_of(uses.some(first, end), memory_samples // num_pods, len(orders), rounds)
        for first, end in pairwise(bounds.tolist())
    )


def gets_of(
    policy: str,
    orders: Sequence[Int64Array],
    chunk_size: int,
    memory_samples: int,
    num_pods: int,
    *,
    batch: int = _BATCH,
    is_listed: bool = True,
) -> int:
    """Of all epochs, by the code of pods. One rank has the order, so that all ask for the same, however many pods.

    :param memory_samples: of all pods together.
    :param is_listed: whether the order is one of the rank's own; else the policy's.
    """
    num_samples = len(orders[0])
    spec = JobSpec(
        "simulated",
        "memory://simulated",
        order="explicit" if is_listed else "keyed",
        chunk_size=chunk_size,
        policy=policy,
        prefetch_window=0,
    )
    job = SimulatedJob.of(
        spec,
        np.array([0, num_samples]),
        np.ones(num_samples, dtype=np.int64),
        SimulatedPods(num_pods, memory_samples // num_pods, at_once_bytes=-(-batch // num_pods)),
        len(orders),
        batch_size=batch,
        orders=dealt(orders, num_samples, 1) if is_listed else (),
    )
    return sum(epoch.gets for epoch in job.run(len(orders)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=24_000, help="a multiple of the chunk size")
    parser.add_argument("--chunk-size", type=int, default=64)
    parser.add_argument("--memory", type=float, default=0.1, help="part of the dataset, of all pods (default: 0.1)")
    parser.add_argument("--pods", type=int, nargs="+", default=[1, 3, 5], help="the first is what others stand beside")
    parser.add_argument("--batch", type=int, default=_BATCH, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="of the bound (default: %(default)s)")
    args = parser.parse_args()
    if args.samples % args.chunk_size:
        parser.error(f"{args.samples} samples are no whole number of chunks of {args.chunk_size}")
    orders, memory = random_orders(args.samples), int(args.memory * args.samples)
    common = (orders, args.chunk_size, memory)
    ways: dict[str, Callable[[int], float]] = {
        "an order kept: the bound": lambda pods: bound_of_pods(*common, pods, args.rounds),
        "exact": lambda pods: gets_of("exact", *common, pods, batch=args.batch),
        "planned, a list of the rank's own": lambda pods: gets_of("planned", *common, pods, batch=args.batch),
        "planned, its own order": lambda pods: gets_of("planned", *common, pods, batch=args.batch, is_listed=False),
    }
    print(
        f"{machine()}; {args.samples:,} samples, chunks of {args.chunk_size}, memory for {memory:,} in all pods "
        f"together, batches of {args.batch}; GETs for 64 samples, mean of {len(orders)} epochs from empty memory, and "
        f"beside {args.pods[0]} pod"
    )
    print(f"{'':36}" + "".join(f"{pods:>10} pods" for pods in args.pods))
    for name, way in ways.items():
        found = [way(pods) for pods in args.pods]
        cells = (f"{each / len(orders) / args.samples * 64:7.2f} {each / found[0] - 1:+7.1%}" for each in found)
        print(f"{name:36}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
