"""How do ranks learn what the others have found important, where pods keep nothing? They gather it as an epoch begins.

By ``torch.distributed``, over a group of its own (gloo), since scores lie in the memory of the host. Each rank tells
what it has found since the last epoch was drawn; all put it together in the same way, so all know the same.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

from refill.errors import InvalidInput
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import Int64Array

__all__ = ["GatheredScores"]


class GatheredScores:
    """Gathers what all ranks found important, for one of them. All ranks make theirs at the same point of the program,
    and come to draw each epoch.

    Raises :class:`InvalidInput` where there are several ranks, and ``torch.distributed`` knows others.
    """

    def __init__(self, spec: JobSpec, rank: int, num_samples: int) -> None:
        self.spec, self.rank = spec, rank
        self._scores = np.full(num_samples, np.nan, dtype=np.float32)
        """That all ranks know."""
        self._found = np.full(num_samples, np.nan, dtype=np.float32)
        """By this rank, since an epoch was drawn last."""
        self._group: torch.distributed.ProcessGroup | None = None
        if spec.world_size > 1:
            is_there = torch.distributed.is_available() and torch.distributed.is_initialized()
            num_there = torch.distributed.get_world_size() if is_there else 1
            if num_there != spec.world_size:
                raise InvalidInput(
                    f"ImportanceSampler with policy planned gathers scores by torch.distributed, which has {num_there} "
                    f"processes, and the job has world_size={spec.world_size}: call init_process_group first"
                )
            self._group = torch.distributed.new_group(backend="gloo")

    def all_know(self, scores: NDArray[np.float32]) -> None:
        """Fact: a checkpoint has these, ``(n,)``, as all ranks knew them. NaN: not trained with yet."""
        self._scores = scores.copy()

    def report_scores(self, sample_ids: Int64Array, scores: NDArray[np.float32]) -> None:
        """Fact: this rank has found these, ``(n,)``. No pod keeps them, so none can lose them."""
        self._found[sample_ids] = scores

    def drawn_from(self, epoch: int, num_samples: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """As :meth:`PodConnection.drawn_from`, when all ranks have come; nothing is in memory then."""
        found = torch.from_numpy(self._found)
        of_ranks = [found]
        if self._group is not None:
            of_ranks = [torch.empty_like(found) for _ in range(self.spec.world_size)]
            torch.distributed.all_gather(of_ranks, found, group=self._group)
        for each in of_ranks:
            of_rank = each.numpy()
            known = ~np.isnan(of_rank)
            self._scores[known] = of_rank[known]
        self._found = np.full(num_samples, np.nan, dtype=np.float32)
        return self._scores.copy(), np.zeros(num_samples, dtype=bool)
