"""How many takes a second does one pod's protocol core sustain? Batches of 256 on one core, medians of rounds.

    python benchmarks/core_takes.py

*From memory*: every slot is valid and resident, so no take needs a refill. *Whole epoch*: groups of ten chunks, refill
decisions included, bytes arriving at once. Floor: what numpy needs to gather and clear as many
random slots of an array of the same size. Prints this machine's processor; takes about 10 s.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
from machine import machine

from refill_service.cache_core.epoch_order import KeyedTraces
from refill_service.cache_core.policies.interface import EpochBegan, Orders, Policy
from refill_service.cache_core.policies.redox import RedoxPolicy
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout

NUM_SAMPLES = 1_000_000
CHUNK_SIZE = 64
BATCH = 256
ROUNDS = 3


def main() -> None:
    print(f"{machine()}, numpy {np.__version__}")
    print(f"takes a second, median of {ROUNDS} rounds")
    order = KeyedTraces(NUM_SAMPLES, seed=1).asked(0, np.arange(NUM_SAMPLES))[0]
    for what, work in (
        ("redox, from memory", lambda: _epoch(_full_core(), order)),
        ("redox, whole epoch", lambda: _epoch(_core(group_size=10), order)),
        ("floor (numpy gather and clear)", lambda: _floor(order)),
        ("order (position -> sample)", lambda: _order()),
    ):
        print(f"{what:32} {NUM_SAMPLES / statistics.median(work() for _ in range(ROUNDS)):12,.0f}")


def _core(group_size: int) -> RedoxPolicy:
    layout = ChunkLayout(np.array([0, NUM_SAMPLES]), CHUNK_SIZE)
    mapping = AbstractMapping(layout.share(0, 1), -(-layout.num_chunks // group_size))
    return RedoxPolicy(_began(mapping))


def _began(mapping: AbstractMapping) -> EpochBegan:
    traces, lengths = KeyedTraces(NUM_SAMPLES, seed=1), np.full(NUM_SAMPLES, 100_000)
    return EpochBegan(mapping, traces, lengths, key="benchmark", settings={"refill": "best"})


def _full_core() -> RedoxPolicy:
    core = _core(group_size=1)
    for chunk in range(core.mapping.num_abstract_chunks):
        first = chunk * CHUNK_SIZE
        _, read = core.memory.take_one(first)
        assert read is not None
        core.arrived(read)
        core.memory.slots[first] = ~first  # put back what was taken to fill the chunk
    return core


def _epoch(core: Policy, order: np.ndarray) -> float:
    def take_all() -> None:
        for i in range(0, NUM_SAMPLES, BATCH):
            _take(core, order[i : i + BATCH])

    return _timed(take_all)


def _take(core: Policy, asked: np.ndarray) -> None:
    _all_arrive(core, core.requested(0, asked).orders)


def _all_arrive(core: Policy, orders: Orders) -> None:
    for read in orders.reads:
        _all_arrive(core, core.arrived(read))


def _floor(order: np.ndarray) -> float:
    slots = np.arange(NUM_SAMPLES)

    def gather() -> None:
        for i in range(0, NUM_SAMPLES, BATCH):
            places = order[i : i + BATCH]
            slots[places]
            slots[places] = -1

    return _timed(gather)


def _order() -> float:
    traces = KeyedTraces(NUM_SAMPLES, seed=2)
    return _timed(lambda: [traces.asked(0, np.arange(i, i + BATCH)) for i in range(0, NUM_SAMPLES - BATCH, BATCH)])


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
