"""Can each sample come at any position of an epoch, and to any rank, with the same probability?

Several hundred epochs go through the core, each with its own seed. Chunk-mates move together within an epoch, so counts
over different samples of one epoch are not independent. What is independent are the epochs: each statistic is of one
sample, or of one chunk, over the epochs, and the smallest p-value counts as many times as there were statistics
(Bonferroni, which holds under any dependence). Seeds are fixed: the outcome is the same on every run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from tests.cache_core.cluster_model import ClusterModel, Shape

from refill_service.cache_core.epoch_order import KeyedTraces
from refill_service.cache_core.policies.interface import EpochBegan, Orders, Policy
from refill_service.cache_core.policies.registry import new_policy
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout, abstract_chunks_for_budget

REJECTED_BELOW = 1e-3
NUM_EPOCHS = 300
NUM_BINS = 5
BATCH = 8


@dataclass(frozen=True)
class Case:
    policy: str
    chunk_size: int
    num_chunks: int
    memory_chunks: int
    groups: str = "consecutive"
    refill: str = "best"
    short_by: int = 0
    """How many samples the last chunk lacks."""

    @property
    def num_samples(self) -> int:
        return self.num_chunks * self.chunk_size - self.short_by


UNIFORM = (
    pytest.param(Case("redox", 8, 40, 4), marks=pytest.mark.variant),
    Case("redox", 8, 40, 4, "interleaved"),
    Case("redox", 32, 12, 3, refill="random"),
    pytest.param(Case("redox", 16, 20, 2), marks=pytest.mark.variant),
)


@pytest.mark.parametrize("case", UNIFORM, ids=str)
def test_every_sample_comes_at_any_position(case: Case) -> None:
    assert smallest_p(bins_of(places_of_epochs(case)), NUM_BINS, case.chunk_size) > REJECTED_BELOW


def test_a_shuffle_buffer_is_rejected() -> None:
    """The test can fail: a shuffle buffer of half the dataset, which reads the dataset in its stored order."""
    places = np.array([buffer_shuffled(320, 160, seed) for seed in range(NUM_EPOCHS)])
    assert smallest_p(bins_of(places), NUM_BINS, 8) < REJECTED_BELOW


@pytest.mark.variant
def test_a_bad_order_in_every_second_epoch_is_rejected() -> None:
    """About as much as the test can see: in every fourth epoch it goes unnoticed with this many epochs."""
    places = places_of_epochs(Case("redox", 8, 40, 4))
    places[::2] = [buffer_shuffled(320, 160, seed) for seed in range(NUM_EPOCHS // 2)]
    assert smallest_p(bins_of(places), NUM_BINS, 8) < REJECTED_BELOW


def test_redox_reads_a_short_chunk_late() -> None:
    """Not uniform: ``best`` prefers chunks that fill more slots, so the short last chunk of a blob has to wait."""
    case = Case("redox", 16, 22, 4, short_by=9)
    places = places_of_epochs(case)
    assert smallest_p(bins_of(places), NUM_BINS, case.chunk_size) < REJECTED_BELOW
    assert places[:, -7:].mean() > 0.6 * case.num_samples


def test_every_sample_comes_to_any_rank() -> None:
    """Two pods that send samples ahead, four ranks that ask in changing turns."""
    ranks = np.array([ranks_of_samples(seed) for seed in range(180)])
    assert smallest_p(ranks, 4, chunk_size=8) > REJECTED_BELOW


@pytest.mark.variant
def test_a_rank_that_always_gets_the_same_samples_is_rejected() -> None:
    ranks = np.array([ranks_of_samples(seed) for seed in range(50)])
    ranks[:, 0] = 1
    assert smallest_p(ranks, 4, chunk_size=8) < REJECTED_BELOW


def smallest_p(categories: np.ndarray, num_categories: int, chunk_size: int) -> float:
    """How likely so uneven a spread is if each sample comes to each category as often as the samples of an epoch do.

    :param categories: ``(num_epochs, num_samples)``, bin of the position or rank of each sample in each epoch.
    """
    from scipy import stats  # slow to import

    num_epochs, num_samples = categories.shape
    counts = np.array([(categories == category).sum(axis=0) for category in range(num_categories)])
    expected = counts.sum(axis=1, keepdims=True) / num_samples
    p_of_samples = stats.chisquare(counts, np.broadcast_to(expected, counts.shape)).pvalue
    p_of_chunks = []
    for first in range(0, num_samples, chunk_size):
        of_chunk = categories[:, first : first + chunk_size]
        for category in range(num_categories):
            share = (of_chunk == category).mean(axis=1)
            p_of_chunks.append(stats.ttest_1samp(share, float(expected[category, 0]) / num_epochs).pvalue)
    return min(1.0, float(np.min(p_of_samples)) * 2 * num_samples, float(np.min(p_of_chunks)) * 2 * len(p_of_chunks))


def bins_of(places: np.ndarray) -> np.ndarray:
    return places * NUM_BINS // places.shape[1]


def places_of_epochs(case: Case) -> np.ndarray:
    """``(NUM_EPOCHS, num_samples)``: the position of each sample in each epoch, one rank, one pod."""
    share = ChunkLayout(np.array([0, case.num_samples]), case.chunk_size).share(0, 1)
    memory = case.memory_chunks * case.chunk_size
    num_abstract_chunks = abstract_chunks_for_budget(share.num_chunks, case.chunk_size, memory)
    mapping = AbstractMapping(share, num_abstract_chunks, case.groups)
    places = np.full((NUM_EPOCHS, case.num_samples), -1)
    for epoch in range(NUM_EPOCHS):
        traces = KeyedTraces(case.num_samples, seed=7, epoch=epoch)
        lengths, own = np.ones(case.num_samples, dtype=np.int64), {"refill": case.refill}
        core = new_policy(case.policy, EpochBegan(mapping, traces, lengths, key=f"7 {epoch} 0", settings=own))
        all_arrive(core, core.memory_changed(memory))
        asked = traces.asked(0, np.arange(case.num_samples))[0]
        for first in range(0, case.num_samples, BATCH):
            taken = core.requested(0, asked[first : first + BATCH])
            places[epoch, taken.samples] = np.arange(first, first + len(taken.samples))
            all_arrive(core, taken.orders)
    assert places.min() == 0, "a sample was not delivered"
    return places


def all_arrive(core: Policy, orders: Orders) -> None:
    for read in orders.reads:
        all_arrive(core, core.arrived(read))


def ranks_of_samples(seed: int) -> np.ndarray:
    """``(320,)``: the rank that got each sample in one epoch."""
    model = ClusterModel(
        Shape(
            blob_samples=(320,),
            chunk_size=8,
            group_size=10,
            num_pods=2,
            num_ranks=4,
            batch=BATCH,
            window=40,
            remote_bytes=10_000,
            capacity_bytes=16_000,
            policy="redox",
            seed=seed,
        )
    )
    for first in range(0, 80, BATCH):
        for rank in model.random.sample(range(4), 4):
            model.ask(rank, np.arange(first, first + BATCH))
            model.some_reads_end()
    ranks = np.full(320, -1)
    for (rank, _), sample in model.answers.items():
        ranks[sample] = rank
    assert ranks.min() == 0, "a sample was not delivered"
    return ranks


def buffer_shuffled(num_samples: int, buffer_samples: int, seed: int) -> np.ndarray:
    """Positions of samples that pass a shuffle buffer in their stored order."""
    buffer, places = [], np.empty(num_samples, dtype=np.int64)
    generator = random.Random(seed)
    position = 0
    for sample in range(num_samples + buffer_samples):
        if sample < num_samples:
            buffer.append(sample)
        if sample >= buffer_samples:
            places[buffer.pop(generator.randrange(len(buffer)))] = position
            position += 1
    return places
