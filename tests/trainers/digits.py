"""What do tests of examples learn? Digits, packed once, on the pods of the other tests of trainers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from tests.trainers.launching import Place

from refill_service.datasets.pack import pack
from refill_service.demo.digits import write_digits

__all__ = ["EXAMPLES", "NUM_DIGITS", "with_digits"]

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_DIGITS = 1500


def with_digits(place: Place) -> Place:
    store = place.folder / "digits"
    if not store.exists():
        store.mkdir()
        asyncio.run(pack(str(write_digits(place.folder / "pictures")[0]), store.as_uri(), blob_bytes=100_000))
    return replace(place, dataset=store.as_uri())
