"""In which order does a rank get the samples of an epoch? As the cache decides it, and beside it exact shuffling and
two bad orders."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from refill.protocol.plan_settings import PlanSettings
from refill.protocol.policies import terms_of
from refill_service.cache_core.epoch_order import KeyedTraces
from refill_service.cache_core.planned.epoch_plan import EpochPlan
from refill_service.cache_core.planned.shares import Shares
from refill_service.cache_core.policies.interface import EpochBegan, Orders, Policy
from refill_service.cache_core.policies.registry import new_policy
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout, abstract_chunks_for_budget

__all__ = ["Order", "delivered"]


@dataclass(frozen=True)
class Order:
    policy: str
    """``exact`` and ``stored`` have no chunks; ``blocks`` shuffles chunks, and nothing within or between them;
    ``planned``; or a policy of the core."""
    chunk_size: int = 0
    memory: float = 0.1
    """Part of the dataset."""
    by_class: bool = True
    """Whether the dataset is stored sorted by class, or mixed."""
    groups: str = "consecutive"
    num_shares: int = 1
    """Of a planned order."""

    def __str__(self) -> str:
        name = f"{self.policy} K={self.chunk_size}" if self.chunk_size else self.policy
        name += f" {self.groups}" * (self.groups != Order.groups)
        name += f", {self.num_shares} shares" * (self.num_shares > 1)
        return name + ", stored mixed" * (not self.by_class)


def delivered(order: Order, num_samples: int, batch: int, seed: int, epoch: int) -> np.ndarray:
    """The samples in the order in which a rank gets them; that of a policy of the core is asked for in batches."""
    if order.policy == "stored":
        return np.arange(num_samples)
    if order.policy == "blocks":
        of_chunk = np.random.default_rng((seed, epoch)).random(-(-num_samples // order.chunk_size))
        return np.argsort(np.repeat(of_chunk, order.chunk_size)[:num_samples], kind="stable")
    if order.policy == "planned":
        return _planned(order, num_samples, seed, epoch)
    traces = KeyedTraces(num_samples, seed=seed, epoch=epoch)
    asked = traces.asked(0, np.arange(num_samples))[0]
    return asked if order.policy == "exact" else _decided(order, traces, asked, batch, f"{seed} {epoch} 0")


def _planned(order: Order, num_samples: int, seed: int, epoch: int) -> np.ndarray:
    run = 64 if order.num_shares == 1 else 32  # as docs/PLANNED.md has it for few shares
    memory = int(num_samples * order.memory)
    settings = PlanSettings("one blob", num_samples, order.chunk_size, order.num_shares, memory, run, seed)
    shares = Shares(ChunkLayout(np.array([0, num_samples]), order.chunk_size), order.num_shares)
    lengths = np.ones(num_samples, dtype=np.int64)
    return EpochPlan(settings, shares, lengths.__getitem__, epoch, ramped=epoch == 0).whole()


def _decided(order: Order, traces: KeyedTraces, asked: np.ndarray, batch: int, key: str) -> np.ndarray:
    """By the core, asked as a pod asks it. Memory is full from the first batch on."""
    num_samples = len(asked)
    memory = int(num_samples * order.memory)
    share = ChunkLayout(np.array([0, num_samples]), order.chunk_size).share(0, 1)
    num_abstract_chunks = abstract_chunks_for_budget(share.num_chunks, order.chunk_size, memory)
    began = EpochBegan(
        AbstractMapping(share, num_abstract_chunks, order.groups),
        traces,
        np.ones(num_samples, dtype=np.int64),
        key=key,
        settings=terms_of(order.policy).settings_with(order.policy, {}),
    )
    core = new_policy(order.policy, began)
    _all_arrive(core, core.memory_changed(memory))
    answers = []
    for first in range(0, num_samples, batch):
        taken = core.requested(0, asked[first : first + batch])
        answers.append(taken.samples)
        _all_arrive(core, taken.orders)
    return np.concatenate(answers)


def _all_arrive(core: Policy, orders: Orders) -> None:
    for read in orders.reads:
        _all_arrive(core, core.arrived(read))
