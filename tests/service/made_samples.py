"""Samples that processes of `refill.pack` make: little to import, for each of them does."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

__all__ = ["breaks_at_170", "sample_of"]


def sample_of(number: int) -> dict[str, Any]:
    data = np.random.default_rng(number).bytes(200 + number % 700)
    return {"bin": data, "cls": number % 7, "json": {"n": number}}


def breaks_at_170(number: int) -> dict[str, Any]:
    if number == 170 and not os.environ.get("REPAIRED"):
        raise ValueError("no such\nphoto")
    return sample_of(number)
