"""Where are the store's counts? In a file that the store and whoever reads them map."""

from __future__ import annotations

import numpy as np

__all__ = ["new_counts", "open_counts"]


def new_counts(path: str) -> np.ndarray:
    np.zeros(3, dtype=np.int64).tofile(path)
    return open_counts(path)


def open_counts(path: str) -> np.ndarray:
    """``(3,)`` int64: GETs, other requests (HEAD, LIST), bytes of bodies sent."""
    return np.memmap(path, dtype=np.int64, mode="r+", shape=(3,))
