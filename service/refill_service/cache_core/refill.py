"""What does the core order from the store? One chunk, and which of its samples are wanted."""

from __future__ import annotations

from dataclasses import dataclass

from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["Refill"]


@dataclass(frozen=True)
class Refill:
    """An order: read ``chunk`` of the share; its ``samples`` are to be kept, in these ``locations``."""

    chunk: int
    """Counted from the start of the share."""
    samples: Int64Array
    """Local ids of the samples that fill a slot, ascending."""
    locations: Int64Array
