"""How is the job named that reads a part of a dataset? All ranks, and the next process, name it alike."""

from __future__ import annotations

import hashlib

from refill.protocol.wire_format import Int64Array

_PART = "-part-"


def job_of_part(job: str, ids: Int64Array) -> str:
    """:param job: that of the whole dataset; ``ids`` ``(n,)``: the samples of the part."""
    return f"{job}{_PART}{hashlib.blake2b(ids.astype('<i8').tobytes(), digest_size=6).hexdigest()}"


def whole_of(job: str) -> str | None:
    """The job of the whole dataset. None: this is no part."""
    whole, is_part, _ = job.rpartition(_PART)
    return whole if is_part else None
