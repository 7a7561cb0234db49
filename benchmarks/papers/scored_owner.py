"""An owner whose samples are scored by what training finds (SHADE), with no I/O."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.sample_mapping import Int64Array
from refill_service.planning.lockstep import LocalOwner

__all__ = ["ScoredOwner"]


class ScoredOwner(LocalOwner):
    def kept(self) -> Int64Array:
        """Ids of the samples in memory that stay there for who asks for them again."""
        return self.machine.kept() + self.mapping.share.first_sample

    def scored(self, samples: Int64Array, scores: NDArray[np.floating]) -> None:
        """The training gave these samples, of all shares, these scores."""
        here = self.mapping.share.holds(samples)
        self.carry_out(self.machine.scored(samples[here], scores[here]))
