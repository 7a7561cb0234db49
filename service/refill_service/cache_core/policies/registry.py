"""Which policies are there? The one place of the service that knows them by name.

A new policy is a file beside this one, its ``KIND`` in the line below, an entry in ``refill.protocol.policies`` (which
clients check a job's settings with) and its tests; ``tests/cache_core/test_policy_contract.py`` tries all of them.
"""

from __future__ import annotations

from refill_service.cache_core.policies import drain, fetching_exact, planned, redox
from refill_service.cache_core.policies.interface import EpochBegan, Policy, PolicyKind

__all__ = ["KINDS", "kind_of", "new_policy", "policy_that_runs"]

KINDS: dict[str, PolicyKind] = {kind.name: kind for kind in (redox.KIND, drain.KIND, fetching_exact.KIND, planned.KIND)}


def kind_of(name: str) -> PolicyKind:
    """Of a name that ``refill.protocol.policies`` has let pass."""
    return KINDS[name]


def new_policy(name: str, began: EpochBegan) -> Policy:
    """One owner's share of one epoch under this policy."""
    return kind_of(name).new(began)


def policy_that_runs(name: str, *, shuffle: bool) -> str:
    """The policy that a job of ``name`` runs. In the order of the dataset each chunk is used up before the next, so
    that there is nothing to redirect and nothing wasted: then requests are bound to slots, or to samples."""
    return name if shuffle or kind_of(name).keeps_order else redox.KIND.name
