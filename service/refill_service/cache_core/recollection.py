"""What did a pod that lost its memory answer? Put together from records: those of its own journal, as far as it goes;
those of other pods, about the ranks that they are home to; and the reports of its own ranks, about themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from refill.protocol.records import Kind, Record
from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["Recollection"]

_NONE = np.empty(0, dtype=np.int64)


class Recollection:
    """Records of several sources, which may overlap: they never contradict each other, since an assignment is never
    changed."""

    def __init__(self) -> None:
        self.ranks: dict[int, tuple[int, set[int]]] = {}
        """The latest epoch that each rank has entered, and the pods that it came by."""
        self.traces: dict[tuple[int, int], Int64Array] = {}
        """Posted traces, by (epoch, rank)."""
        self.table_is_whole = False
        """Whether the pod's own table was found, so that there is nothing more to learn."""
        self.whole_since: dict[int, int] = {}
        """The epoch from which on each rank has reported all that it received."""
        self.unused: set[int] = set()
        """Ranks whose process reported that it had received nothing. Another process of the rank may have."""
        self.unknown_before: dict[int, int] = {}
        """By rank, the epoch before which it was not known even then what it received."""
        self.another_pod_runs_it = False
        """Whether one of the records is from a pod that has the job and is not recovering."""
        self.another_pod_will_recover = False
        """Whether one is from a pod that is recovering, and will recover whatever others know."""
        self._lists_all_ranks = False
        """Whether a rank that is in none of the records has not begun."""
        self._complete: set[tuple[int, int]] = set()
        """``(pod, rank)``: the pod has all that the rank received by way of it."""
        self._in_part: set[tuple[int, int]] = set()
        """``(pod, rank)``: the pod has all that the rank could still report of what it received by way of it."""
        self._asked: dict[int, list[tuple[Int64Array, Int64Array]]] = {}
        self._received: dict[int, list[tuple[int, Int64Array, Int64Array]]] = {}

    def add(self, records: Iterable[Record], source: int) -> None:
        """Records that a pod gave; ``source`` is its ordinal."""
        for record in records:
            epoch, rank = record.epoch, record.rank
            if record.kind is Kind.ANSWERED:
                asked, samples = record.columns
                self._asked.setdefault(epoch, []).append((asked, samples))
            elif record.kind is Kind.RECEIVED:
                positions, samples = record.columns
                self._received.setdefault(epoch, []).append((rank, positions, samples))
                self._came_by(rank, epoch, {source})
            elif record.kind is Kind.OPENED:
                self._came_by(rank, epoch, set(record.columns[0].tolist()))
            elif record.kind is Kind.TRACE:
                self.traces[epoch, rank] = record.columns[0]
            elif record.kind is Kind.WHOLE:
                # A rank that reports has begun, as far as anybody can know. The pod that has its report is its home.
                self._complete.add((source, rank))
                self.whole_since[rank] = max(epoch, self.whole_since.get(rank, 0))
                self._came_by(rank, -1, {source})
            elif record.kind is Kind.PART:
                self._in_part.add((source, rank))
                self._came_by(rank, -1, {source})
            elif record.kind is Kind.UNUSED:
                self.unused.add(rank)
            elif record.kind is Kind.UNKNOWN:
                self.unknown_before[rank] = max(epoch, self.unknown_before.get(rank, 0))
            elif record.kind is Kind.ALL_RANKS:
                self._lists_all_ranks = True
            elif record.kind is Kind.NOT_RECOVERING:
                self.another_pod_runs_it = True
            elif record.kind is Kind.WILL_RECOVER:
                self.another_pod_will_recover = True
            elif record.kind is Kind.WHOLE_TABLE:
                self.table_is_whole = True

    def _came_by(self, rank: int, epoch: int, homes: set[int]) -> None:
        before, known = self.ranks.get(rank, (-1, set()))
        self.ranks[rank] = (max(before, epoch), known | homes)

    def unreported(self, world_size: int) -> list[int]:
        """The ranks of which something may still be unknown: not all pods that were their homes have given all."""
        if self.table_is_whole:
            return []
        return [rank for rank in range(world_size) if not self._is_reported(rank)]

    def has_reported_all(self, rank: int) -> bool:
        """Whether nothing more is to be had of a rank, though something may still be unknown: it has lost a part of its
        record."""
        homes = self.ranks.get(rank, (-1, set[int]()))[1]
        return len(homes) > 0 and all({(home, rank)} & (self._complete | self._in_part) for home in homes)

    def _is_reported(self, rank: int) -> bool:
        if rank not in self.ranks:
            return self._lists_all_ranks  # if so, it has not begun
        homes = self.ranks[rank][1]
        return len(homes) > 0 and all((home, rank) in self._complete for home in homes)

    @property
    def known_from(self) -> dict[int, int]:
        """By rank, the first epoch of which all that it received is known, where that is not epoch 0."""
        found = dict(self.unknown_before)
        if not self.table_is_whole:
            for rank, since in self.whole_since.items():
                found[rank] = max(since, found.get(rank, 0))
        return {rank: epoch for rank, epoch in found.items() if epoch}

    @property
    def newest_entered(self) -> int:
        """The latest epoch that a rank is in; -1 when none is known."""
        return max((epoch for epoch, _ in self.ranks.values()), default=-1)

    @property
    def entered(self) -> list[int]:
        """The epochs that ranks are in, as far as they are known, ascending."""
        return sorted({epoch for epoch, _ in self.ranks.values() if epoch >= 0})

    @property
    def oldest_entered(self) -> int:
        """The oldest epoch that a rank is in. All ranks that are known have left the epochs before."""
        return min((epoch for epoch, _ in self.ranks.values() if epoch >= 0), default=0)

    def a_place_is_unknown(self, world_size: int) -> bool:
        """Whether a rank has not begun, or nobody knows in which epoch it is. It may be one behind the newest."""
        return any(rank not in self.ranks or self.ranks[rank][0] < 0 for rank in range(world_size))

    def given_up(self, without: Collection[int]) -> set[int]:
        """The ranks that nobody has heard, now or when they were waited for in vain before.

        :param without: those that had not reported.
        """
        before = {rank for rank in self.unknown_before if rank not in self.ranks}
        return (before | set(without)) - self.unused

    def epochs(self) -> list[int]:
        """Those that were open here and can still be asked for, ascending. A rank may have entered a later one, and
        wait there until others have entered one before it, of which nothing is known."""
        answered = set(self._asked) | set(self._received)
        newest = max(answered, default=self.oldest_entered)
        return sorted(epoch for epoch in answered.union(self.entered) if self.oldest_entered - 1 <= epoch <= newest)

    def epochs_of_table(self) -> list[int]:
        """Those of which the pod's own table was found, whether or not they can still be asked for, ascending."""
        return sorted(self._asked)

    def forget_partly_known(self, world_size: int) -> None:
        """Drop epochs that all ranks have left and of which a rank did not report all, since it was resumed within one:
        the samples that it had of them must not be dealt again."""
        oldest = self.oldest_entered
        if self.a_place_is_unknown(world_size):
            oldest = min(oldest, self.newest_entered - 1)
        first = min(oldest, max(self.whole_since.values(), default=0))
        for known in (self._asked, self._received):
            for epoch in [epoch for epoch in known if epoch < first]:
                del known[epoch]

    def received_epochs(self) -> list[int]:
        """Those of which ranks have received anything."""
        return sorted(epoch for epoch, parts in self._received.items() if any(len(part[1]) for part in parts))

    def received(self, epoch: int) -> dict[int, tuple[Int64Array, Int64Array]]:
        """By rank, ``(positions, samples)`` of what it received, each position once."""
        parts: dict[int, list[tuple[Int64Array, Int64Array]]] = {}
        for rank, positions, samples in self._received.get(epoch, []):
            parts.setdefault(rank, []).append((positions, samples))
        found = {}
        for rank, pairs in parts.items():
            positions, places = np.unique(np.concatenate([pair[0] for pair in pairs]), return_index=True)
            found[rank] = positions, np.concatenate([pair[1] for pair in pairs])[places]
        return found

    def answered(self, epoch: int, traces: Traces, first_sample: int, end_sample: int) -> tuple[Int64Array, Int64Array]:
        """``(asked, samples)``: the requests to the owner of these samples that were answered, each once."""
        pairs = [pair for pair in self._asked.get(epoch, [])]
        for rank, positions, samples in self._received.get(epoch, []):
            asked, repeats = traces.asked(rank, positions)
            pairs.append((asked[~repeats], samples[~repeats]))
        asked = np.concatenate([pair[0] for pair in pairs] or [_NONE])
        samples = np.concatenate([pair[1] for pair in pairs] or [_NONE])
        here = (asked >= first_sample) & (asked < end_sample)
        asked, places = np.unique(asked[here], return_index=True)
        return asked, samples[here][places]
