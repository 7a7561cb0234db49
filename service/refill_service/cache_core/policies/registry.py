"""What does the service know of the policies that jobs may name? A kind for each entry of ``refill.protocol.policies``.

A new policy is an entry there, a file beside this one, its ``KIND`` in the line below and its tests;
``tests/cache_core/test_policy_contract.py`` tries all of them.
"""

from __future__ import annotations

from refill.protocol.policies import POLICIES
from refill.protocol.spread import RAMP_START
from refill_service.cache_core.policies import fetching_exact, redox
from refill_service.cache_core.policies.interface import EpochBegan, Policy, PolicyKind, default_chunk_size


def _kinds(*kinds: PolicyKind) -> dict[str, PolicyKind]:
    """By name, in the order of the table. Raises ImportError, which names a policy that one side alone has."""
    found = {kind.name: kind for kind in kinds}
    for name in sorted(POLICIES.keys() ^ found.keys()):
        lacks = "the service has no kind for it" if name in POLICIES else "refill.protocol.policies does not list it"
        raise ImportError(f"policy {name}: {lacks}")
    return {name: found[name] for name in POLICIES}


def _first_batch_gets(asked: int, chunk_size: int, chunks_in_memory: float) -> int:
    """A job begins with a part of memory, and each request may be for any of it."""
    chunks = max(1.0, chunks_in_memory / RAMP_START)
    return round(chunks * (1 - (1 - 1 / chunks) ** asked))


def _decides_nothing(began: EpochBegan) -> Policy:
    raise AssertionError("an order that is planned is carried out by no policy")


PLANNED = PolicyKind(
    "planned",
    _decides_nothing,
    default_chunk_size=default_chunk_size,
    first_batch_gets=_first_batch_gets,
    analysed_chunk_sizes=(8, 16, 32, 64),
)
"""Its jobs are carried out without a policy that decides live (``refill_service.planned``): which sample is at a
position is a function."""

KINDS = _kinds(redox.KIND, fetching_exact.KIND, PLANNED)


def kind_of(name: str) -> PolicyKind:
    """Of a name that ``refill.protocol.policies`` has let pass."""
    return KINDS[name]


def new_policy(name: str, began: EpochBegan) -> Policy:
    """One owner's share of one epoch under this policy."""
    return kind_of(name).new(began)
