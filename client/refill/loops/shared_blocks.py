"""What do the training process and its loader workers write for each other? Numbers in memory that they share."""

from __future__ import annotations

import torch


def shared_zeros(shape: int | tuple[int, ...]) -> torch.Tensor:
    """Int64, in memory that all processes share to which torch copies it, forked or spawned."""
    found: torch.Tensor = torch.zeros(shape, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
    return found


def share_again(*blocks: torch.Tensor) -> None:
    """Fact: the object that has these was copied. Where torch did not do it, but ``copy.deepcopy`` or a pickle of
    another library, the copy has memory of its own, which its workers would not share."""
    for block in blocks:
        block.share_memory_()  # type: ignore[no-untyped-call]
