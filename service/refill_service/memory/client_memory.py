"""How does an answer reach a client on the same machine without crossing a socket? Written into memory it lends.

A client asks for a one-time name, by a request like any other, with its token. By that name it hands one segment of
memory (a sealed memfd) over, at the Unix socket ``PATH.memory``, and its requests carry it from then on. The segment is
the client's: allocated before it comes here, and let go of when the connection closes, so nothing of a client that died
stays behind. See ``refill.shared_segments``.
"""

from __future__ import annotations

import mmap
import secrets
import threading
import time
from collections import Counter

from refill.errors import InvalidInput, PodBusy
from refill_service.cache_core.team_quotas import TeamQuotas
from refill_service.memory.memory_door import MemoryDoor
from refill_service.memory.payload import OutgoingFrame

__all__ = ["ClientMemory"]

_NAME_SECONDS = 10.0
_MAX_EXPECTED = 64
"""Names that were given to one team and that nobody has come by yet."""


class ClientMemory:
    """The segments that clients lend. They count towards the pod's resident set: at most ``limit_bytes`` are taken."""

    def __init__(self, limit_bytes: int, quotas: TeamQuotas) -> None:
        self.limit_bytes = limit_bytes
        self._quotas = quotas
        self._used_bytes: Counter[str] = Counter()
        """By team."""
        self._door: MemoryDoor | None = None
        self._counting = threading.Lock()
        """Names are claimed, and bytes counted, where clients come in: in threads."""
        self._expected: dict[str, tuple[str, float]] = {}
        """By name: whose, and until when."""
        self._holders: dict[str, str] = {}
        self._segments: dict[str, mmap.mmap] = {}

    def listen(self, path: str) -> None:
        self._door = MemoryDoor(path, self)

    def close(self) -> None:
        if self._door is not None:
            self._door.close()

    def expect(self, holder: str) -> str:
        """A name by which memory can be handed over, once, within seconds.

        :param holder: whose token it was asked for with; nobody else's answers are written there.
        """
        if self._door is None:
            raise InvalidInput("this pod takes no memory from clients: it has no unix_socket")
        now = time.monotonic()
        with self._counting:
            self._expected = {name: found for name, found in self._expected.items() if now < found[1]}
            if sum(held_by == holder for held_by, _ in self._expected.values()) >= _MAX_EXPECTED:
                raise PodBusy(f"{_MAX_EXPECTED} clients of yours are about to lend memory, as many as may at once")
            name = secrets.token_hex(16)
            self._expected[name] = holder, now + _NAME_SECONDS
        return name

    def write(self, name: str, holder: str, frame: OutgoingFrame) -> bool:
        """Write a frame into a segment; False when there is none of that name and holder, or it is too small."""
        segment = self._segments.get(name)
        if segment is None or self._holders[name] != holder or frame.total_bytes > len(segment):
            return False
        end = 0
        with memoryview(segment) as memory:
            for part in frame.parts():
                start, end = end, end + len(part)
                memory[start:end] = part
        return True

    def claim(self, name: str) -> bool:
        with self._counting:
            holder, until = self._expected.pop(name, ("", 0.0))
            if time.monotonic() >= until:
                return False
            self._holders[name] = holder
        return True

    def room(self, name: str, num_bytes: int) -> bool:
        with self._counting:
            holder = self._holders[name]
            if num_bytes > self._quotas.left_for(holder, self.limit_bytes, self._used_bytes):
                return False
            self._used_bytes[holder] += num_bytes
        return True

    def came(self, name: str, memory: mmap.mmap) -> None:
        self._segments[name] = memory

    def went(self, name: str) -> None:
        del self._segments[name]

    def gone(self, name: str, num_bytes: int) -> None:
        with self._counting:
            self._used_bytes[self._holders.pop(name)] -= num_bytes
