"""What does it cost to count what loops were given, for the digests of receipts?

    python benchmarks/receipt_digest.py

CPU of a loader worker that notes the hashes of a batch, and of the training process that sums them when its loop is
given the batch; the least of 9 rounds of 300 batches. A few seconds.
"""

from __future__ import annotations

import time

import numpy as np
from machine import machine

from refill.pods.loop_digest import LoopDigests, ReceivedHashes
from refill.protocol.dealing import Dealing

SAMPLES, RANKS, RANK, PLAN_ID = 1_281_167, 8, 3, "0123456789abcdef" * 2
BATCHES, ROUNDS = 300, 9


def main() -> None:
    print(f"{machine()}; {SAMPLES:,} samples, {RANKS} ranks, ns of CPU for a sample")
    for batch in (32, 256, 1024):
        rounds = [_round(batch) for _ in range(ROUNDS)]
        noted, summed = (min(times) * 1e9 / BATCHES / batch for times in zip(*rounds, strict=True))
        print(f"batches of {batch:>5}: worker {noted:6.0f}, loop {summed:6.0f}")


def _round(batch: int) -> tuple[float, float]:
    """Seconds of CPU that the worker takes, and the loop."""
    hashes, digests = ReceivedHashes(np.zeros(ReceivedHashes.SHAPE, np.int64)), LoopDigests()
    dealing, ids = Dealing(SAMPLES, RANKS, batch), np.random.default_rng(0).permutation(SAMPLES)[:batch]
    noted = summed = 0.0
    for first in range(0, BATCHES * batch, batch):
        first %= dealing.per_rank - batch
        started = time.process_time()
        hashes.came(PLAN_ID, 0, np.arange(first, first + batch), dealing, RANK, ids)
        between = time.process_time()
        digests.has(0, dealing, RANK, first, first + batch, hashes)
        noted, summed = noted + between - started, summed + time.process_time() - between
    return noted, summed


if __name__ == "__main__":
    main()
