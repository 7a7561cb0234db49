"""Which samples have ranks said that they will ask for, and in which order?

Hints for reading ahead, and for receipts: no sample is answered by them, since every request says what it wants. A list
is used when all of it has come. What there is no memory for is not kept, and neither are the lists of old epochs; then
samples are read when they are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from refill.errors import InvalidInput
from refill.protocol.dealing import Dealing
from refill_service.cache_core.sample_mapping import Int64Array

_KEPT_EPOCHS = 3
_TIMES_DATASET = 2
"""Lists of an epoch may name each sample so often, on average."""
_PART_OF_MEMORY = 4
MOST_RANKS = 1 << 14
"""Whose lists are known, of an epoch: each takes a few hundred bytes, however short it is."""


def list_memory(memory_bytes: int, num_samples: int) -> int:
    """What a job of so many bytes sets aside for lists."""
    return min(
        memory_bytes // _PART_OF_MEMORY, _KEPT_EPOCHS * _TIMES_DATASET * num_samples * _dtype(num_samples).itemsize
    )


def _dtype(num_samples: int) -> np.dtype[np.signedinteger]:
    return np.dtype(np.int32 if num_samples < 2**31 else np.int64)


class AboutList(NamedTuple):
    """What each piece of a rank's list says about the whole list."""

    num_ranks: int
    length: int
    start: int
    """Places before it were had, and are not posted."""
    digest: str
    """Two lists of one length that have the same one are the same."""


@dataclass
class _RankList:
    """One rank's list of an epoch, as far as it has come."""

    about: AboutList
    samples: Int64Array | None
    """From ``start`` on; None: there is no memory for them."""
    come: int = 0
    """Places of which they have come, in a row, from 0 on: those that were had count."""

    @property
    def is_whole(self) -> bool:
        return self.come == self.about.length

    @property
    def used_bytes(self) -> int:
        return 0 if self.samples is None else self.samples.nbytes


@dataclass
class _EpochLists:
    """The lists of all ranks for one epoch."""

    num_ranks: int = 0
    """Of the run whose lists they are."""
    ranks: dict[int, _RankList] = field(default_factory=dict)
    used_bytes: int = 0
    version: int = 0
    """Raised when more is known."""
    begun_anew: int = 0
    """The version when a list last took another's place."""


class PostedLists:
    """Holds the lists of samples that the ranks of one job have posted to a pod.

    :param limit_bytes: of memory for them.
    """

    def __init__(self, num_samples: int, limit_bytes: int) -> None:
        self._num_samples, self._limit_bytes = num_samples, limit_bytes
        self._dtype = _dtype(num_samples)
        self._epochs: dict[int, _EpochLists] = {}
        """The one that was posted to last is the last."""

    def post(self, epoch: int, rank: int, about: AboutList, first: int, samples: Int64Array) -> bool:
        """Fact: ``(n,)`` samples at places ``first`` and on of a rank's list. Returns whether all of it is known now,
        and was not before. Raises :class:`InvalidInput` for a piece that is none of such a list."""
        if not about.start <= first <= first + len(samples) <= about.length:
            raise InvalidInput(
                f"places {first} to {first + len(samples) - 1} of a list of {about.length} from place {about.start} on"
            )
        lists = self._epochs.pop(epoch, None) or _EpochLists()
        self._epochs[epoch] = lists
        known = lists.ranks.get(rank)
        if known is not None and known.about == about and known.is_whole:
            return False
        if known is None and len(lists.ranks) >= MOST_RANKS:
            return False
        if known is None or known.about != about:
            if known is not None:
                lists.begun_anew = lists.version + 1
                lists.used_bytes -= known.used_bytes
            if lists.num_ranks != about.num_ranks:
                if lists.ranks:  # of a run with another number of ranks
                    lists.begun_anew = lists.version + 1
                lists.num_ranks, lists.ranks, lists.used_bytes = about.num_ranks, {}, 0
            known = lists.ranks[rank] = _RankList(about, None, about.start)
            known.samples = self._room_for(epoch, about.length - about.start)
            lists.used_bytes += known.used_bytes
        if first != known.come:
            return False
        if known.samples is not None:
            known.samples[first - about.start : first - about.start + len(samples)] = samples
        known.come += len(samples)
        if known.is_whole:
            lists.version += 1
        return known.is_whole

    def of_rank(self, rank: int) -> dict[int, str]:
        """The digests of a rank's lists that are known, by epoch."""
        known = ((epoch, lists.ranks.get(rank)) for epoch, lists in self._epochs.items())
        return {epoch: each.about.digest for epoch, each in known if each is not None and each.is_whole}

    @property
    def epochs(self) -> list[int]:
        """Those that are known of."""
        return list(self._epochs)

    def version(self, epoch: int) -> int:
        """0: no list is known; another number when more is known."""
        return self._epochs[epoch].version if epoch in self._epochs else 0

    def begun_anew(self, epoch: int) -> int:
        """The version at which a list of the epoch last took another's place."""
        return self._epochs[epoch].begun_anew if epoch in self._epochs else 0

    def is_whole(self, epoch: int) -> bool:
        """Whether the lists of all ranks are known."""
        whole = self._whole(epoch)
        return bool(whole) and len(whole) == next(iter(whole.values())).about.num_ranks

    def of_epoch(self, epoch: int) -> list[tuple[int, AboutList, Int64Array]]:
        """``(rank, about it, its samples from about.start on)`` of each list that is known and kept."""
        whole = self._whole(epoch)
        return [(rank, each.about, each.samples) for rank, each in whole.items() if each.samples is not None]

    def num_positions(self, epoch: int) -> int:
        """Of all lists that are known."""
        return sum(each.about.length for each in self._whole(epoch).values())

    def _whole(self, epoch: int) -> dict[int, _RankList]:
        ranks = self._epochs[epoch].ranks if epoch in self._epochs else {}
        return {rank: each for rank, each in ranks.items() if each.is_whole}

    def _room_for(self, epoch: int, count: int) -> Int64Array | None:
        """For so many samples, if there is, or old epochs make some."""
        others = [each for each in self._epochs if each != epoch]
        for old in others[: max(0, len(others) + 1 - _KEPT_EPOCHS)]:
            del self._epochs[old]
        while sum(each.used_bytes for each in self._epochs.values()) + count * self._dtype.itemsize > self._limit_bytes:
            if next(iter(self._epochs)) == epoch:
                return None
            del self._epochs[next(iter(self._epochs))]
        return np.empty(count, dtype=self._dtype)


def merged(lists: list[tuple[int, AboutList, Int64Array]]) -> tuple[Int64Array, Int64Array]:
    """``(positions, samples)`` of lists of one epoch, each ``(n,)``, by positions: place by place, rank by rank."""
    positions, samples = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for rank, about, found in lists:
        positions.append(Dealing.of_lists(about.num_ranks).positions(rank, np.arange(about.start, about.length)))
        samples.append(found.astype(np.int64))
    in_order = np.argsort(np.concatenate(positions), kind="stable")
    return np.concatenate(positions)[in_order], np.concatenate(samples)[in_order]
