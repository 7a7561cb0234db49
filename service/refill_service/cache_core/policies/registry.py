"""What does the service know of the policies that jobs may name? A kind for each entry of ``refill.protocol.policies``.

A new policy is an entry there, a file beside this one, its ``KIND`` in the line below and its tests;
``tests/cache_core/test_policy_contract.py`` tries all of them.
"""

from __future__ import annotations

from refill.protocol.policies import POLICIES
from refill_service.cache_core.policies import fetching_exact, planned, redox
from refill_service.cache_core.policies.interface import EpochBegan, Policy, PolicyKind

__all__ = ["KINDS", "kind_of", "new_policy"]


def _kinds(*kinds: PolicyKind) -> dict[str, PolicyKind]:
    """By name, in the order of the table. Raises ImportError, which names a policy that one side alone has."""
    found = {kind.name: kind for kind in kinds}
    for name in sorted(POLICIES.keys() ^ found.keys()):
        lacks = "the service has no kind for it" if name in POLICIES else "refill.protocol.policies does not list it"
        raise ImportError(f"policy {name}: {lacks}")
    return {name: found[name] for name in POLICIES}


KINDS = _kinds(redox.KIND, fetching_exact.KIND, planned.KIND)


def kind_of(name: str) -> PolicyKind:
    """Of a name that ``refill.protocol.policies`` has let pass."""
    return KINDS[name]


def new_policy(name: str, began: EpochBegan) -> Policy:
    """One owner's share of one epoch under this policy."""
    return kind_of(name).new(began)
