"""What has a home pod been sent ahead, and how much more may it be sent? (Redox 3.8, Brand 3.4)

The remote abstract memory: samples that owners sent ahead, each kept for the request that it answers. Room is
*granted* to an owner with each request and stays reserved until its answer is settled, so that owners who answer
at the same time can't exceed the limit together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

__all__ = ["RemoteMemory"]

Payload = TypeVar("Payload")
Request = tuple[int, int, int]
"""``(epoch, rank, position)``"""


class RemoteMemory(Generic[Payload]):
    """Samples sent ahead for the ranks of one job at one home pod.

    ``used + granted <= capacity`` always holds. A payload is whatever the caller keeps for a sample.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.granted = 0
        self.entries: dict[Request, tuple[int, Payload | None]] = {}
        """None: its payload was given up, and its owner has to be asked after all."""

    def __len__(self) -> int:
        return len(self.entries)

    def grant(self, owners_left: int = 1) -> int:
        """Reserve an even part of the free room for one of ``owners_left`` owners that are asked together."""
        room = max(0, self.capacity - self.used - self.granted) // max(1, owners_left)
        self.granted += room
        return room

    def settle(self, room: int, received: Iterable[tuple[Request, int, Payload]] = ()) -> int:
        """Fact: the answer that ``room`` was granted for has ended, well or badly. Returns how many samples are kept:
        those that are here already are not, nor what an owner sent past its room.

        :param received: ``(request, bytes, payload)`` of each sample sent ahead.
        """
        self.granted -= room
        kept = 0
        for request, size, payload in received:
            if size <= room and request not in self.entries:
                room -= size
                self.entries[request] = (size, payload)
                self.used += size
                kept += 1
        return kept

    def take(self, request: Request) -> Payload | None:
        """The payload that answers a request, which leaves the memory; None when it is not here, or no more."""
        entry = self.entries.pop(request, None)
        if entry is None:
            return None
        self.used -= entry[0]
        return entry[1]

    def let_go(self) -> None:
        """Fact: others need the memory. What was sent ahead is asked of its owners again, should somebody ask for it;
        that it was sent is still known."""
        self.entries = dict.fromkeys(self.entries, (0, None))
        self.used = 0

    def forget(self, rank: int, before_epoch: int) -> Counter[int]:
        """Fact: the rank has left every epoch before this one, so nothing will be asked of them again. Returns how many
        samples of each were never asked for."""
        left = [held for held in self.entries if held[1] == rank and held[0] < before_epoch]
        for request in left:
            self.take(request)
        return Counter(epoch for epoch, _, _ in left)

    def held(self, epoch: int) -> Counter[int]:
        """How many samples are here for each rank."""
        return Counter(rank for of_epoch, rank, _ in self.entries if of_epoch == epoch)
