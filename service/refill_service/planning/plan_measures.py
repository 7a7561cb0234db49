"""How good is an order? Where neighbours and classes go; what a planned one reads and holds by its rule; and DeepIO's
measure of how much was in memory.

All but memory is measured from the order alone, so that it can be checked from a dump of it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refill_service.cache_core.planned.epoch_plan import EpochPlan
from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array

_PARTS = {"all": (0.0, 1.0), "first": (0.0, 0.05), "last": (0.95, 1.0)}
"""Of an epoch."""

_STEPS = (1, 16, 64)
"""Of windows in which classes are counted."""


def reads_of(plan: EpochPlan, lengths: Int64Array) -> dict[str, Any]:
    """``gets``; ``bytes_read``, in datasets; ``peak_samples``, the most that are in memory at once, of this epoch;
    ``lead``, positions from a chunk's read by the rule to its first use: the mean, ``lead_median``, ``lead_least``.

    :param lengths: ``(samples,)`` bytes of each sample of the dataset.
    """
    read_at, first_use, sizes, num_bytes = [], [], [], 0
    for number in range(plan.shares.num_shares):
        share, order = plan.of_share(number)
        if not len(share.samples):
            continue
        of_sample = np.repeat(np.arange(len(share.chunks), dtype=np.int64), np.diff(share.starts))
        of_bytes = lengths[share.samples]
        delivered = np.cumsum(of_bytes[order.samples])
        # The place by which so many bytes of the share have been delivered; its position, or, where the epoch before
        # is still running, as far before the first.
        places = np.searchsorted(delivered, order.read_at) + (order.read_at > 0)
        positions = np.append(plan.weaving.positions(number, np.arange(len(of_sample), dtype=np.int64)), -1)
        positions[-1] = plan.num_positions
        read_at.append(np.where(order.read_at <= 0, 0, positions[places]))
        used = np.full(len(share.chunks), len(of_sample), dtype=np.int64)
        np.minimum.at(used, of_sample[order.samples], np.arange(len(of_sample), dtype=np.int64))
        first_use.append(positions[used[order.reads]])
        sizes.append(np.diff(share.starts)[order.reads])
        num_bytes += int(of_bytes.sum())
    if not sizes:
        return {"gets": 0, "bytes_read": 0.0, "peak_samples": 0, "lead": 0.0, "lead_median": 0.0, "lead_least": 0}
    at, counts = np.concatenate(read_at), np.concatenate(sizes)
    in_order = np.argsort(at, kind="stable")
    held = np.cumsum(counts[in_order]) - at[in_order]
    lead = np.concatenate(first_use) - at
    return {
        "gets": len(at),
        "bytes_read": num_bytes / max(1, int(lengths.sum())),
        "peak_samples": int(held.max()),
        "lead": float(lead.mean()),
        "lead_median": float(np.median(lead)),
        "lead_least": int(lead.min()),
    }


def groups_of(first_sample: Int64Array, size: int) -> Int64Array:
    """For each sample, which run of so many neighbours of its blob it is in."""
    largest = int(np.diff(first_sample).max())
    layout = ChunkLayout(first_sample, min(size, largest))
    return layout.locate(np.arange(layout.num_samples, dtype=np.int64))[0]


def spread_of(order: Int64Array, first_sample: Int64Array, chunk_size: int, batch: int, step: int) -> dict[str, Any]:
    """Co-batch in a rank's batches and in steps, and distance, of chunk-mates and of 64 neighbours."""
    found: dict[str, Any] = {}
    for name, size in (("_mates", chunk_size), ("", RUN)):
        groups = groups_of(first_sample, size)
        found[f"cobatch_rank{name}"] = co_batches(order, groups, batch)
        found[f"cobatch_step{name}"] = co_batches(order, groups, step)
        found[f"distance{name}"] = distances(order, groups)
    return found


def spread(place_of: Int64Array, first_sample: Int64Array, batch_size: int) -> tuple[float, float]:
    """``(mean distance, co-batch)`` of samples that lie within one run of 64 of a blob, whatever the chunk size was, so
    that epochs can be compared: 1/3 and 1 in a uniform shuffle. Raises ValueError where no run has two.

    :param place_of: ``(n,)`` the place in the epoch, ``0 <= place < n``, at which each sample was delivered.
    """
    order, groups = np.argsort(place_of), groups_of(first_sample, RUN)
    distance, co_batch = distances(order, groups)["all"], co_batches(order, groups, batch_size)["all"]
    if distance is None or co_batch is None:
        raise ValueError("no run has two samples")
    return distance, co_batch


def co_batches(order: Int64Array, groups: Int64Array, batch: int) -> dict[str, float | None]:
    """How often two of a group meet in a batch, against a uniform shuffle: 1. Of whole batches; None: there are none,
    or no group has two.

    :param order: ``(n,)`` the sample at each position.
    :param groups: ``(n,)`` the group of each sample.
    """
    num_samples, batch = len(order), min(batch, len(order))
    sizes = np.bincount(groups)
    pairs = float((sizes * (sizes - 1)).sum()) / 2
    found: dict[str, float | None] = {}
    for name, (start, end) in _PARTS.items():
        batches = slice(int(num_samples * start) // batch, int(num_samples * end) // batch)
        count = batches.stop - batches.start
        if not pairs or count < 1 or batch < 2:
            found[name] = None
            continue
        of_batches = groups[order[batches.start * batch : batches.stop * batch]]
        number = np.arange(len(of_batches), dtype=np.int64) // batch
        together = np.unique(number * len(sizes) + of_batches, return_counts=True)[1]
        met = float((together * (together - 1)).sum()) / 2
        found[name] = met / (count * pairs * batch * (batch - 1) / (num_samples * (num_samples - 1)))
    return found


def distances(order: Int64Array, groups: Int64Array) -> dict[str, float | None]:
    """How far from the others of its group a sample comes on average, as a part of the epoch: 1/3 in a uniform shuffle.
    ``first`` and ``last`` are of the samples that come there."""
    num_samples = len(order)
    position = np.empty(num_samples, dtype=np.int64)
    position[order] = np.arange(num_samples, dtype=np.int64)
    by_group = np.lexsort((position, groups))
    at, sizes = position[by_group], np.bincount(groups)[groups[by_group]]
    begins = np.flatnonzero(np.append(True, groups[by_group][1:] != groups[by_group][:-1]))
    within = np.arange(num_samples, dtype=np.int64) - np.repeat(begins, np.diff(np.append(begins, num_samples)))
    before = np.cumsum(at) - at
    before -= np.repeat(before[begins], np.diff(np.append(begins, num_samples)))
    total = np.repeat(np.add.reduceat(at, begins), np.diff(np.append(begins, num_samples)))
    # The sum of distances to all others: of those before, and of those behind.
    sums = at * within - before + (total - before - at) - at * (sizes - within - 1)
    found: dict[str, float | None] = {}
    for name, (start, end) in _PARTS.items():
        here = (at >= int(num_samples * start)) & (at < int(num_samples * end)) & (sizes > 1)
        pairs = int((sizes[here] - 1).sum())
        found[name] = float(sums[here].sum()) / pairs / num_samples if pairs else None
    return found


def class_counts(order: Int64Array, classes: Int64Array, step: int) -> dict[str, float | None]:
    """Are classes as frequent in windows of so many steps as in the whole? chi2 / degrees of freedom, the mean of all
    windows: 1 in a uniform shuffle, and less where a window is a large part of the epoch. None: no whole window."""
    totals = np.bincount(classes)
    totals = totals[totals > 0]
    number = np.unique(classes, return_inverse=True)[1][order]
    found: dict[str, float | None] = {}
    for steps in _STEPS:
        window = steps * step
        count = len(order) // window
        if not count or len(totals) < 2:
            found[str(steps)] = None
            continue
        of_window = np.arange(count * window, dtype=np.int64) // window
        counts = np.bincount(of_window * len(totals) + number[: count * window], minlength=count * len(totals))
        expected = totals * (window / len(order))
        chi2 = ((counts.reshape(count, -1) - expected) ** 2 / expected).sum(axis=1)
        found[str(steps)] = float(chi2.mean()) / (len(totals) - 1)
    return found


RUN = 64
_COUNTED_EXACTLY = 1 << 22


def randomization_level(num_samples: int, memory_fraction: float) -> float:
    """DeepIO's measure of how random an order is that is drawn from memory for a part of the dataset (1.0: fully).

    DeepIO ("Entropy-Aware I/O Pipelining for Large-Scale Deep Learning on HPC Systems"), section III-C, equations 1, 4
    and 5: ``RL = H / H_fully = sum_i Q(i) log2 P(i, r) / sum_i Q(i) log2 Q(i)`` with ``Q(i) = 1 / (N - i)`` and
    ``P(i, r) = 1 / (1/R - r) * 1 / (N_mem - i mod N_mem)``. R is the part of the dataset that memory holds,
    N_mem = R N, and r = i div N_mem the round of loading. Where R does not divide 1, the last round loads the rest.

    It knows the size of memory and nothing of chunks, so it is the same for every policy and chunk size. What it lacks
    to 1 goes with 1 / (log N)**2; beyond 2**22 samples it is scaled so, which is right to four digits.
    """
    if num_samples > _COUNTED_EXACTLY:
        lacking = 1 - randomization_level(_COUNTED_EXACTLY, memory_fraction)
        return 1 - lacking * (math.log(_COUNTED_EXACTLY) / math.log(num_samples)) ** 2
    # Up, so that rounding never adds a round of a few samples: the last ones weigh most.
    in_memory = max(1, math.ceil(num_samples * min(1.0, memory_fraction) - 1e-6))
    pipelined = fully = 0.0
    for start in range(0, num_samples, 1 << 20):
        i = np.arange(start, min(start + (1 << 20), num_samples), dtype=np.float64)
        first_of_round = i // in_memory * in_memory
        rounds_left = np.maximum(1.0, (num_samples - first_of_round) / in_memory)
        loaded = np.minimum(in_memory, num_samples - first_of_round)
        q = 1 / (num_samples - i)
        pipelined -= float((q * np.log2(rounds_left * (loaded - (i - first_of_round)))).sum())
        fully += float((q * np.log2(q)).sum())
    return pipelined / fully if fully else 1.0


def block_randomization_level(num_samples: int, block_size: int) -> float:
    """DeepIO's measure of an order that draws blocks of so many samples at random and keeps the order within each.

    ``P(i) = 1 / ceil((N - i) / g)`` at every place i, as the same section has it for files. Where more than 2**22
    samples are left, the sum is an integral.
    """
    summed = min(num_samples, _COUNTED_EXACTLY)
    left = np.arange(summed, 0, -1, dtype=np.float64)
    blocks = float((np.log2(np.ceil(left / block_size)) / left).sum())
    fully = float((np.log2(left) / left).sum())
    if num_samples > summed:
        more = (math.log(num_samples) ** 2 - math.log(summed) ** 2) / 2 / math.log(2)
        fully += more
        blocks += more - math.log2(block_size) * math.log(num_samples / summed)
    return blocks / fully if fully else 1.0
