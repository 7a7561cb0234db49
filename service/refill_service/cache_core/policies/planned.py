"""What is to be known of policy ``planned`` by its name. Its jobs are carried out without a policy that decides live
(``refill_service.planned``): which sample is at a position is a function.
"""

from __future__ import annotations

from refill.protocol.spread import RAMP_START
from refill_service.cache_core.policies.default_chunk_size import default_chunk_size
from refill_service.cache_core.policies.interface import EpochBegan, Policy, PolicyKind

__all__ = ["KIND"]


def _first_batch_gets(asked: int, chunk_size: int, chunks_in_memory: float) -> int:
    """A job begins with a part of memory, and each request may be for any of it."""
    chunks = max(1.0, chunks_in_memory / RAMP_START)
    return round(chunks * (1 - (1 - 1 / chunks) ** asked))


def _decides_nothing(began: EpochBegan) -> Policy:
    raise AssertionError("an order that is planned is carried out by no policy")


KIND = PolicyKind(
    "planned",
    _decides_nothing,
    default_chunk_size=default_chunk_size,
    first_batch_gets=_first_batch_gets,
    analysed_chunk_sizes=(8, 16, 32, 64),
)
