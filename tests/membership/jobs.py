"""Which jobs do these tests run?"""

from __future__ import annotations

import uuid
from typing import Any

from refill.protocol.job_spec import JobSpec

__all__ = ["Packed", "spec_of"]

Packed = tuple[str, dict[str, bytes]]


def spec_of(packed: Packed, **settings: Any) -> JobSpec:
    name = f"losses-{uuid.uuid4().hex[:8]}"
    how = {"policy": "redox", "chunk_size": 16, "memory_bytes": 600_000, "world_size": 2}
    return JobSpec(name, packed[0], **(how | settings))
