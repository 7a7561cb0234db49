"""What does every loader hand to the loop? One batch: the ids of its samples, and their bytes in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from peers.dataset import sample_id

__all__ = ["Batch", "Epochs", "collate"]

Batch = tuple[torch.Tensor, torch.Tensor]
"""``(n,)`` int64 ids and ``(bytes,)`` uint8; torch moves both from worker to loop through shared memory."""
Epochs = Callable[[int], Iterable[Batch]]
"""What a loader's file opens: the batches of an epoch."""


def collate(samples: Sequence[bytes]) -> Batch:
    ids = torch.tensor([sample_id(sample) for sample in samples])
    return ids, torch.frombuffer(bytearray().join(samples), dtype=torch.uint8)
