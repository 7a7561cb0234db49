"""How well was an epoch shuffled? Two measures of where chunk-mates went, and DeepIO's of how much was in memory.

Chunk-mates are samples that lie within one run of 64 of a blob, whatever the chunk size was, so that epochs can be
compared.
"""

from __future__ import annotations

import math

import numpy as np

from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array

__all__ = ["RUN", "block_randomization_level", "randomization_level", "spread"]

RUN = 64
_COUNTED_EXACTLY = 1 << 22


def spread(place_of: Int64Array, first_sample: Int64Array, batch_size: int) -> tuple[float, float]:
    """``(mean distance, co-batch ratio)`` of chunk-mates.

    Distance is their mean distance in the epoch, as a part of it: 1/3 in a uniform shuffle. Co-batch is how often two
    of them meet in one batch, against a uniform shuffle: 1.

    :param place_of: ``(n,)`` the place in the epoch, ``0 <= place < n``, at which each sample was delivered.
    :param first_sample: ``(blobs + 1,)``; a run ends where its blob ends.
    """
    num_samples = len(place_of)
    run_size = min(RUN, int(np.diff(first_sample).max()))
    run, _ = ChunkLayout(first_sample, run_size).locate(np.arange(num_samples, dtype=np.int64))
    order = np.lexsort((place_of, run))
    place, run = place_of[order], run[order]
    sizes = np.bincount(run)
    pairs = float((sizes * (sizes - 1)).sum()) / 2
    # Of n sorted places the k-th is larger than k others and smaller than n - 1 - k.
    rank_in_run = np.arange(num_samples) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    distance = float((place * (2 * rank_in_run - sizes[run] + 1)).sum()) / pairs / num_samples

    batch = place // batch_size
    together = np.unique(run * (num_samples // batch_size + 1) + batch, return_counts=True)[1]
    met = float((together * (together - 1)).sum()) / 2 / pairs
    batches = np.bincount(np.arange(num_samples) // batch_size)
    met_if_uniform = float((batches * (batches - 1)).sum()) / (num_samples * (num_samples - 1))
    return distance, met / met_if_uniform


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
