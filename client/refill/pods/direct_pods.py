"""Which pod has the sample at a position in memory? A function of the plan, so that a rank can ask that pod itself.

Nothing hangs on the answer: every pod answers every position, and asks the one that has it where that is another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from refill.errors import InvalidInput
from refill.pods.answer_checks import read_as_of_a_pod
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.share_owners import share_owners
from refill.protocol.weaving import Weaving, weaving_of
from refill.protocol.wire_format import Int64Array

_KEPT_WEAVINGS = 2


class DirectPods:
    """Says which pods a rank asks for which positions, when it asks all pods of a batch itself.

    :param share_sizes: samples of each share, as a pod says; raises :class:`RefillError` for what no pod would.
    :param urls: of all pods, by ordinal.
    """

    def __init__(self, settings: PlanSettings, share_sizes: Any, urls: list[str], source: str) -> None:
        with read_as_of_a_pod(source):
            self._sizes = np.array(share_sizes, dtype=np.int64)
            if self._sizes.shape != (settings.num_shares,) or int(self._sizes.sum()) != settings.num_samples:
                raise InvalidInput(f"its shares have {self._sizes.sum()} samples, and the plan {settings.num_samples}")
        self.urls = urls
        self._settings = settings
        self._owners = share_owners(settings.num_shares, len(urls))
        self._weavings: dict[int, Weaving] = {}

    def parts(self, epoch: int, positions: Int64Array) -> list[tuple[str, Int64Array]]:
        """``(pod, places)``: which of ``(n,)`` positions each pod has."""
        weaving = self._weavings.get(epoch)
        if weaving is None:
            weaving = self._weavings[epoch] = weaving_of(self._settings, self._sizes, epoch)
            for old in list(self._weavings)[:-_KEPT_WEAVINGS]:
                self._weavings.pop(old, None)  # another thread may have done it
        pods = self._owners[weaving.places(positions)[0]]
        return [(self.urls[pod], np.flatnonzero(pods == pod)) for pod in sorted(set(pods.tolist()))]
