"""What does a training process know of how important samples are, and to whom has it reported them?

Losses of batches come from the training loop. A thread ranks them and reports to the pods, a few times a second, so
that no step waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill.build import say_once
from refill.errors import RefillError
from refill.gathered_scores import GatheredScores
from refill.pods.background_work import background_work
from refill.pods.pod_connection import PodConnection
from refill.protocol.importance import rank_scores
from refill.protocol.wire_format import Int64Array

__all__ = ["TrainingScores"]

log = logging.getLogger(__name__)

_REPORT_EVERY_SECONDS = 0.5


class TrainingScores:
    """Keeps and reports the scores of one rank's samples. Scores of other ranks come with what an epoch is drawn
    from."""

    def __init__(self, connection: PodConnection | GatheredScores, num_samples: int) -> None:
        self.scores = np.full(num_samples, np.nan, dtype=np.float32)
        self._connection = connection
        self._of_others = np.arange(num_samples) % connection.spec.world_size != connection.rank
        """Of a checkpoint, each rank reports a part. Not those that this rank has found since."""
        self._found = np.zeros(num_samples, dtype=bool)
        """By this rank, since an epoch was drawn last: only its own state has these."""
        self._unreported = np.zeros(num_samples, dtype=bool)
        self._batches: deque[tuple[Int64Array, Any]] = deque()
        self._changing = threading.Lock()
        self._reporting = threading.Lock()
        self._reporter: threading.Thread | None = None
        self._failing = False

    def trained(self, sample_ids: Int64Array, losses: Any) -> None:
        """Fact: a batch was trained with. Returns at once.

        :param losses: ``(batch,)`` a tensor on any device, or an array.
        """
        self._batches.append((sample_ids, losses))
        if self._reporter is None or not self._reporter.is_alive():
            self._reporter = threading.Thread(target=self._report_now_and_then, name="refill-scores", daemon=True)
            self._reporter.start()

    def report(self) -> None:
        """Report all that is known and was not reported. Returns when pods know it; raises what went wrong."""
        with self._reporting:
            self._rank()
            with self._changing:
                ids = np.flatnonzero(self._unreported)
                scores = self.scores[ids]
                self._unreported[ids] = False
            try:
                self._connection.report_scores(ids, scores)
            except BaseException:
                with self._changing:
                    self._unreported[ids] = True
                raise

    def drawn_from(self, epoch: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """``(scores, cached)`` as :meth:`PodConnection.drawn_from`, after all was reported that this rank has found."""
        self.report()
        scores, cached = self._connection.drawn_from(epoch, len(self.scores))
        known = ~np.isnan(scores)
        with self._changing:
            self.scores[known] = scores[known]
            self._found[:] = False
            num_samples, spec = len(scores), self._connection.spec
            self._of_others = np.arange(num_samples) % spec.world_size != self._connection.rank
        return scores, cached

    def restore(self, scores: NDArray[np.float32], found: NDArray[np.bool_]) -> None:
        """Fact: a checkpoint has these, as :meth:`snapshot`. They are reported before the next epoch is drawn."""
        with self._changing:
            self._batches.clear()
            self.scores, self._found = scores.astype(np.float32).copy(), found.copy()
            known = ~np.isnan(self.scores)
            if isinstance(self._connection, GatheredScores):  # the state of each rank has what all knew
                self._connection.all_know(np.where(found, np.float32(np.nan), self.scores))
                self._unreported = known & found
            else:
                self._unreported = known & (found | ~self._of_others)

    def snapshot(self) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Copies: all that is known, what was found last included; and which of it this rank has found since an epoch
        was drawn last, ``(n,)`` each."""
        self._rank()
        with self._changing:
            return self.scores.copy(), self._found.copy()

    def _rank(self) -> None:
        """Within their batch, those that came and were not ranked yet."""
        with self._changing:
            while self._batches:
                ids, losses = self._batches.popleft()
                of_batch = losses.detach().float().cpu().numpy() if hasattr(losses, "detach") else np.asarray(losses)
                is_finite = np.isfinite(of_batch)
                if not is_finite.all():  # it would count as the largest
                    say_once("some losses are no numbers: their samples keep the scores that they had")
                    ids = ids[is_finite]
                self.scores[ids] = rank_scores(of_batch[is_finite])
                self._unreported[ids] = self._found[ids] = True
                self._of_others[ids] = False

    def _report_now_and_then(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(_REPORT_EVERY_SECONDS)
            try:
                with background_work():
                    self.report()
                self._failing = False
            except RefillError as error:  # the next batch tries again, and the next epoch's draw raises it
                if not self._failing:
                    log.warning("scores could not be reported, training goes on: %s", error)
                self._failing = True
            if self._failing or not self._batches:
                return  # the next batch begins anew
