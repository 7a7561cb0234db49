"""How does a trace name classes? In the upper bits of its entries.

An entry of a trace is a sample id. Where a job redirects within classes, it is the id of a sample *of the class that
the position asks for*, and the class stands above it: ``class * 2**40 + id``. Each sample is named by one position (or
by more: repeats), so the numbers of each class come out, for each owner, too; which sample of the class comes is the
owner's choice. Where all entries are of class 0, there are no classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill.protocol.wire_format import Int64Array

__all__ = ["MOST_CLASSES", "classes_of", "entries_of", "ids_of"]

_ID_BITS = 40
_ID_MASK = (1 << _ID_BITS) - 1
MOST_CLASSES = 1 << 16
"""Classes are ``0 <= class < MOST_CLASSES``. Pods keep a few hundred bytes for each."""


def entries_of(sample_ids: Int64Array, classes: Int64Array | NDArray[np.int32]) -> Int64Array:
    """Both ``(n,)``."""
    return sample_ids | (classes.astype(np.int64) << _ID_BITS)


def ids_of(entries: NDArray[np.signedinteger[Any]]) -> Int64Array:
    return entries.astype(np.int64, copy=False) & _ID_MASK


def classes_of(entries: NDArray[np.signedinteger[Any]]) -> Int64Array:
    return entries.astype(np.int64, copy=False) >> _ID_BITS
