"""What do the training process and its loader workers write for each other? Numbers in memory that they share.

Nothing is filled or copied by torch: it would start threads for a block as large as these, and a process that is forked
later waits for ever in its first own use of them.
"""

from __future__ import annotations

import math

import torch


def shared_zeros(shape: int | tuple[int, ...]) -> torch.Tensor:
    """Int64, in memory that all processes share to which torch copies it, forked or spawned."""
    sizes = (shape,) if isinstance(shape, int) else shape
    # As torch's own default_collate has it.
    storage = torch.UntypedStorage._new_shared(8 * math.prod(sizes))  # type: ignore[no-untyped-call]  # noqa: SLF001
    return torch.empty(0, dtype=torch.int64).set_(storage).view(sizes)


def share_again(*blocks: torch.Tensor) -> None:
    """Fact: the object that has these was copied. Where torch did not do it, but ``copy.deepcopy`` or a pickle of
    another library, the copy has memory of its own, which its workers would not share."""
    for block in blocks:
        if not block.is_shared():  # type: ignore[no-untyped-call]
            shared = shared_zeros(tuple(block.shape))
            shared.numpy()[:] = block.numpy()
            block.set_(shared.untyped_storage(), 0, shared.shape, shared.stride())
