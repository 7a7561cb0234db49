"""Which samples do the positions of a request ask for? The same at the home pod and at every owner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refill.errors import InvalidInput
from refill.protocol.wire_format import BatchRequest, Int64Array
from refill_service.jobs.job import Job
from refill_service.jobs.owner import Owner

__all__ = ["AskedPositions", "asked_positions"]


@dataclass(frozen=True)
class AskedPositions:
    """Positions of a rank, and what its trace asks for there. All arrays have an entry for each position."""

    epoch: int
    rank: int
    positions: Int64Array
    samples: Int64Array
    repeats: NDArray[np.bool_]
    """Whether it repeats a sample of the epoch (padding, replacement), and gets exactly that."""


async def asked_positions(request: BatchRequest, job: Job, owner: Owner) -> AskedPositions:
    """Waits until the traces of the epoch are known. Raises :class:`InvalidInput` for a rank that the job has not, and
    for a position past the end of its trace."""
    epoch, rank, positions = request.epoch, request.rank, request.positions
    job.check_rank(rank)
    traces = await job.traces(epoch, owner.waits)
    if int(positions.max()) >= traces.length(rank):
        raise InvalidInput(
            f"rank {rank} asks for position {int(positions.max())}, but epoch {epoch} of job {job.spec.name} "
            f"has {traces.length(rank)} positions for it"
        )
    return AskedPositions(epoch, rank, positions, *traces.asked(rank, positions))
