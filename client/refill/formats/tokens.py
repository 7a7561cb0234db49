"""Tokens: a sample is numbers of one type, one after another. Field ``tokens``: an array of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from refill.formats.parsed import Parser, damaged

NUMBER_TYPES = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
)  # fmt: skip
"""Of which formats have numbers, by numpy's names."""


def make_parser(about: Mapping[str, Any]) -> Parser:
    name = about["dtype"]
    if name not in NUMBER_TYPES:
        raise ValueError(f"no type of numbers {name!r:.40}")
    dtype = np.dtype(name).newbyteorder("<")

    def parse(data: memoryview, sample_id: int) -> tuple[str, dict[str, Any]]:
        if len(data) % dtype.itemsize:
            raise damaged(sample_id, "run of tokens", len(data), f"{len(data)} bytes are not a whole number of {name}")
        # A copy: one sample kept by the caller must not keep the whole batch's buffer, and torch wants to write.
        return str(sample_id), {"tokens": np.frombuffer(data, dtype).astype(name)}

    return parse
