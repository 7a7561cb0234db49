"""Which scores does an owner keep of its share, and when may ranks draw an epoch from them?

Only of jobs whose cache goes by importance. Scores come by way of ``jobs/scores.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from refill.errors import EpochNotReady, InvalidInput, RefillError
from refill_service.cache_core.score_book import DrawnFrom, ScoreBook
from refill_service.jobs.changes import Changes
from refill_service.jobs.job import Job
from refill_service.jobs.rank_waits import RankWaits

__all__ = ["OwnerScores"]


class OwnerScores:
    """Of one owner."""

    def __init__(self, job: Job, waits: RankWaits) -> None:
        self.book = ScoreBook(job.share.num_samples, job.spec.world_size) if job.is_by_importance else None
        self.name = os.urandom(8).hex()
        """Another one in another run, when the scores are gone."""
        self._job = job
        self._waits = waits
        self._draws = Changes()
        """A rank has come to draw an epoch, or the owner was closed."""
        self._why_closed: RefillError | None = None

    def close(self, why: RefillError) -> None:
        """Who waits to draw an epoch gets ``why``."""
        self._why_closed = why
        self._draws.happened()

    def rank_has_drawn(self) -> None:
        """Fact: a rank has posted what it drew."""
        self._draws.happened()

    def checked_book(self) -> ScoreBook:
        """Raises :class:`InvalidInput` for a job whose cache takes no scores."""
        if self.book is None:
            raise InvalidInput(
                f"job {self._job.spec.name} takes no scores: its policy must be exact with eviction importance, as "
                "refill.ImportanceSampler registers it"
            )
        return self.book

    async def drawn_from(self, epoch: int, rank: int, cached: Callable[[], NDArray[np.bool_]]) -> DrawnFrom:
        """As :meth:`Owner.drawn_from`.

        :param cached: ``(samples,)`` what is in memory now.
        """
        book = self.checked_book()
        book.draws(epoch, rank)
        self._draws.happened()

        def has_drawn(other: int) -> bool:
            return other in self._job.posted.of_epoch(epoch) or self._job.ranks.epoch(other) >= epoch

        try:
            await self._waits.until(
                self._draws, lambda: self._why_closed is not None or not book.waits_for(epoch, has_drawn)
            )
        except TimeoutError as error:
            behind = book.waits_for(epoch, has_drawn)
            raise EpochNotReady(
                f"epoch {epoch} of job {self._job.spec.name} is drawn when rank {behind[0] if behind else '?'} has "
                "told how important its last samples were",
                ranks=behind,
            ) from error
        if self._why_closed is not None:
            raise self._why_closed
        return book.drawn_from(epoch, cached)
