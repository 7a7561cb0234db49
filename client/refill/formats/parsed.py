"""What do parsers of formats hand over? The fields of a sample, decoded as far as the format says how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from refill.errors import SampleDamaged

__all__ = ["Coded", "Parser", "damaged", "named"]

Parser = Callable[[memoryview, int], tuple[str, dict[str, Any]]]
"""``(bytes of a sample, its id) -> (key, fields)``. A field is a value, or bytes that ``decode`` is about: a
``memoryview`` that is decoded by the field's name, as a tar's member, or :class:`Coded`."""


class Coded(NamedTuple):
    """Bytes whose format is known, whatever the field is called."""

    kind: str
    """An extension that ``decode`` knows."""
    data: memoryview


def named(fields: dict[str, Any], sample_id: int) -> tuple[str, dict[str, Any]]:
    """``(key, fields)``: a field ``__key__`` is the key, else the id is; ``__id__`` is always refill's."""
    fields.pop("__id__", None)
    key = fields.pop("__key__", None)
    return key if type(key) is str else str(sample_id), fields


def damaged(sample_id: int, what: str, at: int, why: str) -> SampleDamaged:
    return SampleDamaged(f"sample {sample_id} is no {what}, at its byte {at}: {why}", sample=sample_id, at=at)
