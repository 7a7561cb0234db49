"""Which positions of an epoch has a rank left out? Who asks for a part of its trace only is being divided twice.

What a rank asks of an epoch is a prefix of its trace, or all of it. Loader workers ask out of order, and a loop that is
broken off leaves the batches that were in flight: so a gap counts when enough was asked for above it. Only what a rank
has asked of this pod from the start of an epoch on is judged: a pod that came to be the home in the middle of one does
not know what was asked before.
"""

from __future__ import annotations

from refill.errors import SamplesSkipped
from refill.protocol.position_set import PositionSet

_IN_FLIGHT_BATCHES = 512
"""More than the batches that loaders have in flight for one rank: 32 workers with 16 batches each. What loses less is
noticed by the client, who knows its workers."""


def skipped_for_good(asked: PositionSet, largest_batch: int) -> tuple[int, int] | None:
    """The first ``(start, end)`` that was left out of an epoch which the rank has left; None: nothing was, for sure."""
    gap = asked.first_gap()
    return gap if gap is not None and gap[1] + _IN_FLIGHT_BATCHES * largest_batch <= asked.end else None


def samples_skipped(job: str, rank: int, epoch: int, start: int, end: int) -> SamplesSkipped:
    """What a rank is told that has left an epoch without ``[start, end)`` of its positions."""
    return SamplesSkipped(
        f"rank {rank} of job {job} has left epoch {epoch} and never asked for its positions {start} to {end - 1}, "
        "while it asked for later ones: its samples are divided a second time, or batches are skipped. Let the trainer "
        "take the sampler as it is (docs/TRAINERS.md); allow_skipped=True, given to the dataset, allows it",
        epoch=epoch,
        rank=rank,
        start=start,
        end=end,
    )


class JudgedEpochs:
    """Epochs of which a home pod has seen all requests of a rank."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        """By rank, the first epoch that is judged."""

    def comes(self, rank: int, epoch: int) -> None:
        """Fact: a rank asks for an epoch here."""
        self._first.setdefault(rank, epoch)

    def left(self, rank: int, epoch: int) -> None:
        """Fact: a rank asks for an epoch by way of another home."""
        self._first[rank] = max(epoch + 1, self._first.get(rank, 0))

    def __call__(self, rank: int, epoch: int) -> bool:
        return rank in self._first and epoch >= self._first[rank]
