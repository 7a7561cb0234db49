"""How much have a training process and its loader workers fetched? Counted in memory that they share."""

from __future__ import annotations

import torch
import torch.utils.data

__all__ = ["FetchedCounts"]

_COUNTED_WORKERS = 256


class FetchedCounts:
    """Of one dataset object, and of its copies in workers, forked or spawned."""

    def __init__(self) -> None:
        # Row 0 is for the training process. One writer for each row, so that no lock is needed.
        self._rows = torch.zeros((1 + _COUNTED_WORKERS, 3), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def add(self, samples: int, num_bytes: int, damaged: int = 0) -> None:
        """Fact: this process has fetched these.

        :param damaged: samples that came, too, and that it goes on without.
        """
        worker = torch.utils.data.get_worker_info()
        row = self._rows[0 if worker is None else 1 + worker.id % _COUNTED_WORKERS]
        row += torch.tensor([samples, num_bytes, damaged])

    @property
    def samples(self) -> int:
        return int(self._rows[:, 0].sum())

    @property
    def num_bytes(self) -> int:
        return int(self._rows[:, 1].sum())

    @property
    def damaged(self) -> int:
        return int(self._rows[:, 2].sum())
