"""What are the bytes of a sample, and how many of them does somebody hold?"""

from __future__ import annotations

__all__ = ["Damage", "Payload", "Payloads"]

Payload = bytes | memoryview
"""The bytes of a sample: its own, or a view into the buffer that it came with, which it keeps whole."""


class Damage(bytes):
    """In place of a sample that can't be read: the error, as JSON."""


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

    def get(self, sample: int) -> Payload | None:
        return self._by_sample.get(sample)

    def pop(self, sample: int) -> Payload | None:
        payload = self._by_sample.pop(sample, None)
        if payload is not None:
            self.num_bytes -= len(payload)
        return payload

    def clear(self) -> None:
        self._by_sample.clear()
        self.num_bytes = 0
