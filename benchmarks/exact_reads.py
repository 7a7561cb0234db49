"""What does it cost to keep the order? GETs of policy ``exact`` for 64 samples, by eviction and chunk size. No I/O.

python benchmarks/exact_reads.py [--samples N] [--memory PART] [--epochs E]
"""

from __future__ import annotations

import argparse

import numpy as np

from refill.protocol.policies import terms_of
from refill_service.cache_core.epoch_order import KeyedTraces
from refill_service.cache_core.policies.interface import NOTHING_CARRIED, EpochBegan, Orders, Policy
from refill_service.cache_core.policies.registry import new_policy
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout

ROWS = [("never", 1), ("rolling", 8), ("rolling", 64), ("renewal", 8), ("renewal", 64), ("earliest", 64)]


def gets_of_epochs(num_samples: int, eviction: str, chunk_size: int, memory: float, num_epochs: int) -> list[int]:
    """Of one pod and one rank that asks for one sample after the other, to the last epoch but one."""
    layout = ChunkLayout(np.array([0, num_samples]), chunk_size)
    mapping, lengths = AbstractMapping(layout.share(0, 1), 1), np.ones(num_samples, dtype=np.int64)
    traces = [KeyedTraces(num_samples, epoch=epoch) for epoch in range(num_epochs + 1)]
    carried, found = NOTHING_CARRIED, []
    for epoch in range(num_epochs):
        settings = terms_of("exact").settings_with("exact", {"eviction": eviction})
        began = EpochBegan(
            mapping, traces[epoch], lengths, settings=settings, carried=carried, next_traces=traces[epoch + 1]
        )
        policy = new_policy("exact", began)
        arrive(policy, policy.memory_changed(int(memory * num_samples)))
        go_on(policy)
        order, _ = traces[epoch].asked(0, np.arange(num_samples))
        for place in range(num_samples):
            arrive(policy, policy.requested(0, order[place : place + 1]).orders)
            go_on(policy)
        carried = policy.close()
        found.append(policy.counts.refills)
    return found


def arrive(policy: Policy, orders: Orders) -> None:
    for read in orders.reads:
        arrive(policy, policy.arrived(read))


def go_on(policy: Policy) -> None:
    while policy.may_go_on:
        arrive(policy, policy.go_on())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=131_072)
    parser.add_argument("--memory", type=float, default=0.1, help="part of the dataset (default: 0.1)")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    print(f"| eviction | K | epoch 0 | epochs 1 to {args.epochs - 1} | bytes read |")
    print("| --- | --- | --- | --- | --- |")
    for eviction, chunk_size in ROWS:
        gets = gets_of_epochs(args.samples, eviction, chunk_size, args.memory, args.epochs)
        of_64 = np.array(gets) / args.samples * 64
        first, later = of_64[0], of_64[1:].mean()
        print(f"| {eviction} | {chunk_size} | {first:.2f} | {later:.2f} | {later * chunk_size / 64:.2f}x |", flush=True)


if __name__ == "__main__":
    main()
