"""What are the bytes of a sample, and how many of them does somebody hold?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Damage", "Payload", "Payloads"]

Payload = bytes | memoryview
"""The bytes of a sample: its own, or a view into the buffer that it came with, which it keeps whole."""


class Damage(bytes):
    """Stands in place of a sample that can't be read: the error, as JSON."""


class Payloads:
    """Bytes by number, such as that of a sample, and how many they are."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._by_sample: dict[int, Payload] = {}

    def __len__(self) -> int:
        return len(self._by_sample)

    def put(self, sample: int, payload: Payload) -> None:
        self.pop(sample)
        self._by_sample[sample] = payload
        self.num_bytes += len(payload)

    def put_all(self, samples: list[int], payloads: list[Payload]) -> None:
        if not self._by_sample.keys().isdisjoint(samples):
            for sample in samples:
                self.pop(sample)
        self._by_sample.update(zip(samples, payloads, strict=True))
        self.num_bytes += sum(map(len, payloads))

    def get(self, sample: int) -> Payload | None:
        return self._by_sample.get(sample)

    def pop(self, sample: int) -> Payload | None:
        payload = self._by_sample.pop(sample, None)
        if payload is not None:
            self.num_bytes -= len(payload)
        return payload

    def has_all(self, samples: list[int]) -> bool:
        return all(map(self._by_sample.__contains__, samples))

    def taken(self, samples: list[int], stay: NDArray[np.bool_]) -> list[Payload]:
        """The bytes of these, all of which are there. They leave, but for those that are to stay.

        :param stay: ``(n,)``
        """
        by_sample = self._by_sample
        if stay.any():
            found = [by_sample[sample] for sample in samples]
            for sample, stays in zip(samples, stay.tolist(), strict=True):
                if not stays:
                    self.pop(sample)
            return found
        found = [by_sample.pop(sample) for sample in samples]
        self.num_bytes -= sum(map(len, found))
        return found

    def clear(self) -> None:
        self._by_sample.clear()
        self.num_bytes = 0
