"""What has just left, in case it is asked for again?

An answer can be lost, and a home pod can ask for a sample while it is being sent ahead. The assignment says which
sample it must be; here are its bytes, if they left a short while ago, so that no read of its own is needed.
"""

from __future__ import annotations

from collections import OrderedDict

from refill_service.memory.payload import Payload

__all__ = ["RecentlySent"]


class RecentlySent:
    """The samples sent last, up to ``limit_bytes``; keys are (epoch, sample)."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._payloads: OrderedDict[tuple[int, int], Payload] = OrderedDict()

    def put(self, epoch: int, samples: list[int], payloads: list[Payload]) -> None:
        for sample, payload in zip(samples, payloads, strict=True):
            if (epoch, sample) not in self._payloads:
                self._payloads[epoch, sample] = payload
                self.used_bytes += len(payload)
        self.limit(self.limit_bytes)

    def limit(self, limit_bytes: int) -> None:
        """Forget what is more than so much."""
        self.limit_bytes = limit_bytes
        while self.used_bytes > self.limit_bytes:
            _, oldest = self._payloads.popitem(last=False)
            self.used_bytes -= len(oldest)

    def get(self, epoch: int, sample: int) -> Payload | None:
        return self._payloads.get((epoch, sample))

    def clear(self) -> None:
        self._payloads.clear()
        self.used_bytes = 0
