"""What does each policy cost, and how well does it shuffle? 131,072 samples, one pod, memory for a tenth of them.

    python benchmarks/policies.py

For each policy and chunk size: GETs for 64 samples, bytes read as a multiple of the dataset, and two measures of how
chunk-mates (the samples of one 64-sample run of a blob) are spread over the epoch: their mean distance (uniform: 0.333
of the epoch) and how often two of them meet in a batch of 256, against a uniform shuffle (1.0). No I/O; about 20 s.
"""

from __future__ import annotations

import numpy as np

from refill_service.cache_core.epoch_order import KeyedTraces
from refill_service.cache_core.policies import new_epoch
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout, abstract_chunks_for_budget

NUM_SAMPLES = 131_072
MEMORY_SAMPLES = NUM_SAMPLES // 10
RUN = 64
BATCH = 256


def main() -> None:
    print("policy  groups           K  GETs/64  bytes read  distance  co-batch")
    for policy, chunk_size in (("redox", 64), ("drain", 64), ("drain", 16), ("drain", 8)):
        for order in ("consecutive", "interleaved"):
            _row(policy, chunk_size, order)


def _row(policy: str, chunk_size: int, order: str) -> None:
    share = ChunkLayout(np.array([0, NUM_SAMPLES]), chunk_size).share(0, 1)
    mapping = AbstractMapping(share, abstract_chunks_for_budget(share.num_chunks, chunk_size, MEMORY_SAMPLES), order)
    traces = KeyedTraces(NUM_SAMPLES, seed=1)
    core = new_epoch(
        policy,
        mapping,
        traces,
        np.ones(NUM_SAMPLES, dtype=np.int64),
        capacity_bytes=MEMORY_SAMPLES,
        refill="best",
        prefetch_window=0,
        key="benchmark",
    )
    for refill in core.start():
        core.refill_arrived(refill)
    place = np.empty(NUM_SAMPLES, dtype=np.int64)
    asked = traces.asked(0, np.arange(NUM_SAMPLES))[0]
    for position, (sample, location) in enumerate(zip(asked.tolist(), mapping.locations(asked).tolist(), strict=True)):
        answer, refills = core.take_one(sample, location)
        place[answer] = position
        for refill in refills:
            core.refill_arrived(refill)
    distance, co_batch = _spread(place)
    print(
        f"{policy:7} {order:13} {chunk_size:4} {core.counts.refills * RUN / NUM_SAMPLES:8.2f}"
        f" {core.counts.samples_read / NUM_SAMPLES:10.2f}x {distance:9.3f} {co_batch:9.2f}",
        flush=True,
    )


def _spread(place: np.ndarray) -> tuple[float, float]:
    """``(mean distance, co-batch ratio)`` of chunk-mates; ``place[sample]`` is the sample's position in the epoch."""
    runs = place.reshape(-1, RUN)
    pairs = RUN * (RUN - 1)
    distance = np.mean([np.abs(run[:, None] - run[None, :]).sum() / pairs for run in runs]) / NUM_SAMPLES
    batches = runs // BATCH
    meetings = np.mean([((run[:, None] == run[None, :]).sum() - RUN) / pairs for run in batches])
    return float(distance), float(meetings / ((BATCH - 1) / (NUM_SAMPLES - 1)))


if __name__ == "__main__":
    main()
