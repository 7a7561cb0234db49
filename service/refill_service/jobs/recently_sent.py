"""What has just left, in case it is asked for again?

An answer can be lost, and a home pod can ask for a sample while it is being sent ahead. The assignment says which
sample it must be; here are its bytes, if they left a short while ago, so that no read of its own is needed.
"""

from __future__ import annotations

from collections import deque

from refill_service.memory.payload import Payload

__all__ = ["RecentlySent"]


class RecentlySent:
    """The samples sent last, up to ``limit_bytes``, by epoch and sample."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._payloads: dict[int, dict[int, Payload]] = {}
        """By epoch."""
        self._sent: deque[tuple[int, list[int]]] = deque()
        """``(epoch, samples)`` of one answer each, the oldest first."""
        self._num_forgotten = 0
        """Of the oldest one."""

    def put(self, epoch: int, samples: list[int], payloads: list[Payload]) -> None:
        of_epoch = self._payloads.get(epoch, {})
        if not of_epoch.keys().isdisjoint(samples):
            new = [(each, payload) for each, payload in zip(samples, payloads, strict=True) if each not in of_epoch]
            samples, payloads = [each for each, _ in new], [payload for _, payload in new]
        if not samples:
            return
        self._payloads.setdefault(epoch, of_epoch).update(zip(samples, payloads, strict=True))
        self._sent.append((epoch, samples))
        self.used_bytes += sum(map(len, payloads))
        self.limit(self.limit_bytes)

    def limit(self, limit_bytes: int) -> None:
        """Forget what is more than so much."""
        self.limit_bytes = limit_bytes
        while self.used_bytes > self.limit_bytes:
            epoch, samples = self._sent[0]
            self.used_bytes -= len(self._payloads[epoch].pop(samples[self._num_forgotten]))
            self._num_forgotten += 1
            if self._num_forgotten == len(samples):
                self._sent.popleft()
                self._num_forgotten = 0
                if not self._payloads[epoch]:
                    del self._payloads[epoch]

    def get(self, epoch: int, sample: int) -> Payload | None:
        return self._payloads.get(epoch, {}).get(sample)

    def clear(self) -> None:
        self._payloads.clear()
        self._sent.clear()
        self.used_bytes = self._num_forgotten = 0
