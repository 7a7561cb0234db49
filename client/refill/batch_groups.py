"""Which ranks share a batch? Those of one group in tensor, context or pipeline parallel training."""

from __future__ import annotations

from typing import Any, NamedTuple

from refill.errors import InvalidInput

__all__ = ["BatchGroups", "batch_groups"]


class BatchGroups(NamedTuple):
    """``size`` ranks of each group, ``apart`` from each other: 2 ranks 4 apart are 0 and 4, 1 and 5, ..., 8 and 12."""

    size: int = 1
    apart: int = 1

    def number(self, rank: int) -> int:
        """Of the group of a rank, which asks for batches as if it were a rank."""
        return rank // (self.size * self.apart) * self.apart + rank % self.apart

    def member(self, rank: int) -> int:
        """Which one of its group a rank is."""
        return rank // self.apart % self.size


def batch_groups(given: Any) -> BatchGroups:
    """
    :param given: how many ranks in a row share a batch; or the dimension of a ``torch.distributed`` DeviceMesh whose
        ranks do, ``mesh["tp"]``. Raises :class:`InvalidInput`.
    """
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        return BatchGroups(given)
    ranks = getattr(given, "mesh", None)
    if ranks is None or not hasattr(ranks, "flatten"):
        raise InvalidInput(f"batch_group must be a number of ranks or a dimension of a DeviceMesh, got {given!r:.100}")
    if ranks.ndim != 1:
        raise InvalidInput(
            f"batch_group must be one dimension of a DeviceMesh, mesh['tp'], got one of {ranks.ndim} dimensions"
        )
    found = ranks.flatten().tolist()
    apart = found[1] - found[0] if len(found) > 1 else 1
    if apart < 1 or found != list(range(found[0], found[0] + apart * len(found), apart)):
        raise InvalidInput(f"the ranks of batch_group must be equally far apart, got {found}")
    return BatchGroups(len(found), apart)
