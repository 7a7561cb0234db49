"""Of which requests is it not known whether they were answered? Kept until the epochs concerned are over.

What a rank received is unknown where all pods and processes with records of it have lost them or died. It stays
unknown, whatever happens later: those requests of the rank that are not answered afterwards are *unknown* in the
receipt, or one of them if all are answered. One number for each rank says it: what the rank received in epochs before
that one is not known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from refill.protocol.records import Kind, Record

__all__ = ["UnknownDeliveries"]


class UnknownDeliveries:
    """Of one owner."""

    def __init__(self) -> None:
        self._known_from: dict[int, int] = {}
        """By rank, the first epoch of which all is known that it received."""
        self._from_next: set[int] = set()
        """Ranks of which it is not known either in which epoch they were."""

    def __bool__(self) -> bool:
        return bool(self._known_from or self._from_next)

    @property
    def num_ranks(self) -> int:
        """Of which something is unknown, in an epoch that is not over for good."""
        return len(self._from_next | set(self._known_from))

    def restored(self, known_from: Mapping[int, int], without: Collection[int], newest: int) -> None:
        """Fact: the owner has gone on after a restart.

        :param known_from: by rank, the first epoch of which all that it received is known.
        :param without: ranks that had not reported.
        :param newest: the latest epoch that a rank has entered, -1 if that is not known. Another may have been one
            ahead.
        """
        for rank, epoch in known_from.items():
            self.known_from(rank, epoch)
        for rank in without:
            if newest < 0:
                self._from_next.add(rank)
            else:
                self.known_from(rank, newest + 2)

    def known_from(self, rank: int, epoch: int) -> None:
        """Fact: what the rank received in epochs before this one is unknown."""
        if epoch > self._known_from.get(rank, 0):
            self._known_from[rank] = epoch

    def epoch_opens(self, epoch: int) -> list[Record]:
        """Fact: the first epoch since the restart opens. Returns what is to be written down of it.

        :param epoch: the newest that a rank is in by then.
        """
        ranks, self._from_next = sorted(self._from_next), set()
        for rank in ranks:
            self.known_from(rank, epoch + 2)
        return [Record(Kind.UNKNOWN, self._known_from[rank], rank) for rank in ranks]

    def ranks(self, epoch: int) -> frozenset[int]:
        """The ranks of which it is not known what they received in this epoch."""
        return frozenset(self._from_next | {rank for rank, first in self._known_from.items() if epoch < first})

    def ranks_that_had_come(self, epoch: int) -> frozenset[int]:
        """Those of them that may have been in this epoch, or past it, when memory was lost. The last epoch of which
        something may be unknown is one that they may have been sent samples of ahead."""
        return self.ranks(epoch + 1)

    def by_rank(self) -> dict[int, int]:
        """By rank, the first epoch of which all that it received is known."""
        return dict(self._known_from)

    def records(self) -> Iterator[Record]:
        for rank, epoch in sorted(self._known_from.items()):
            yield Record(Kind.UNKNOWN, epoch, rank)

    def forget(self, before_epoch: int) -> None:
        """Fact: nothing is asked of earlier epochs any more."""
        for rank in [rank for rank, epoch in self._known_from.items() if epoch <= before_epoch]:
            del self._known_from[rank]
