"""When is work over that is done side by side, each piece at the same rate (processor sharing)? And when are transfers
of several pods over, whose link shares what it carries fairly among them?

Nothing waits for what others began before it. Times never go back from one call to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Generic, TypeVar

__all__ = ["FairLink", "SharedWork"]

What = TypeVar("What")
_NEARLY = 1e-12
"""Of what was done: less than this is left of a piece only by rounding."""


class SharedWork(Generic[What]):
    """Pieces of work; each is done at ``rate``, units a second, which whoever drives this sets when :attr:`num`
    changes."""

    def __init__(self) -> None:
        self.rate = 1.0
        self._done = 0.0
        """Of a piece that began when nothing had been done."""
        self._at = 0.0
        self._over: list[tuple[float, int, What]] = []
        """By ``_done`` when a piece is over, then by when it began."""
        self._num_begun = 0

    @property
    def num(self) -> int:
        """Pieces that are being done."""
        return len(self._over)

    def begin(self, now: float, work: float, what: What) -> None:
        self.go_on(now)
        self._num_begun += 1
        heappush(self._over, (self._done + work, self._num_begun, what))

    def go_on(self, now: float) -> None:
        """Fact: it is ``now``; before the rate changes."""
        if self._over and now > self._at:
            self._done += self.rate * (now - self._at)
        self._at = max(self._at, now)

    @property
    def next_over_at(self) -> float:
        """When the first piece is over if nothing changes; infinite if there is none."""
        if not self._over:
            return math.inf
        left = max(0.0, self._over[0][0] - self._done)
        return self._at + (left / self.rate if left else 0.0)

    def over(self, now: float) -> list[What]:
        """What is over by now, in the order in which it was; it is given once. ``now`` is no later than
        :attr:`next_over_at`."""
        at_next = now >= self.next_over_at
        self.go_on(now)
        if at_next:
            self._done = max(self._done, self._over[0][0])
        found = []
        while self._over and self._over[0][0] <= self._done * (1 + _NEARLY):
            found.append(heappop(self._over)[2])
        if not self._over:
            self._done = 0.0  # so that no digits are lost over many epochs
        return found


class FairLink(Generic[What]):
    """Transfers of several pods. Each gets as much as every other one, but those of a pod together no more than the
    pod's own bandwidth; what they leave is for others.

    :param link: bytes a second of all transfers together, and ``bandwidth`` of those of each pod; may be infinite.
    """

    def __init__(self, num_pods: int, bandwidth: float, link: float) -> None:
        self._bandwidth, self._link = bandwidth, link
        self._of_pods: list[SharedWork[What]] = [SharedWork() for _ in range(num_pods)]

    def begin(self, now: float, pod: int, num_bytes: float, what: What) -> None:
        no_time = math.isinf(min(self._bandwidth, self._link))
        self._go_on(now)
        self._of_pods[pod].begin(now, 0.0 if no_time else num_bytes, what)
        self._share()

    @property
    def next_over_at(self) -> float:
        return min((pod.next_over_at for pod in self._of_pods), default=math.inf)

    def over(self, now: float) -> list[What]:
        """The transfers that are over by now, each given once. ``now`` is no later than :attr:`next_over_at`."""
        found = [what for pod in self._of_pods for what in pod.over(now)]
        self._share()
        return found

    def _go_on(self, now: float) -> None:
        for pod in self._of_pods:
            pod.go_on(now)

    def _share(self) -> None:
        """Those that want least of each transfer's equal part first: what they leave is shared by the others."""
        left, busy = self._link, [pod for pod in self._of_pods if pod.num]
        num_left = sum(pod.num for pod in busy)
        for pod in _most_transfers_first(busy):
            pod.rate = _finite(min(self._bandwidth / pod.num, left / num_left))
            left -= pod.rate * pod.num
            num_left -= pod.num


def _most_transfers_first(pods: Iterable[SharedWork[What]]) -> list[SharedWork[What]]:
    """A pod with many transfers can give each of them least."""
    return sorted(pods, key=lambda pod: -pod.num)


def _finite(rate: float) -> float:
    """Where nothing bounds transfers they take no time, and no rate is used."""
    return 1.0 if math.isinf(rate) else rate
