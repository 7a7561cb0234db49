"""How much have a training process and its loader workers fetched? Counted in memory that they share."""

from __future__ import annotations

import os
import threading
from typing import Any

from refill.pods.own_life import loader_worker

_COUNTED_WORKERS = 256


class FetchedCounts:
    """Counts what one dataset object fetched, with its copies in workers, forked or spawned.

    :param shared: zeros of ``SHAPE`` in memory that these share.
    """

    SHAPE = (1 + _COUNTED_WORKERS, 3)

    def __init__(self, shared: Any) -> None:
        # Row 0 is for the training process. One process writes each row, so that they need no lock between them.
        self._rows = shared

    def add(self, samples: int, num_bytes: int, damaged: int = 0) -> None:
        """Fact: this process has fetched these.

        :param damaged: samples that came, too, and that it goes on without.
        """
        worker = loader_worker()
        row = self._rows[0 if worker is None else 1 + worker % _COUNTED_WORKERS]
        with _adding:
            for column, more in enumerate((samples, num_bytes, damaged)):
                row[column] += more

    @property
    def samples(self) -> int:
        return int(self._rows[:, 0].sum())

    @property
    def num_bytes(self) -> int:
        return int(self._rows[:, 1].sum())

    @property
    def damaged(self) -> int:
        return int(self._rows[:, 2].sum())


_adding = threading.Lock()
"""Between threads of this process."""


def _in_child() -> None:
    global _adding
    _adding = threading.Lock()


os.register_at_fork(after_in_child=_in_child)
