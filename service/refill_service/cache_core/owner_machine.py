"""Which epochs does an owner have open, how is memory divided between them, and what follows from each fact?

Facts come in as calls, in any order: a rank comes, requests come, bytes arrive or will not. Each returns its
:data:`Order`\\ s, which the shell (``jobs/owner.py``) carries out one after another before it reports the
next fact; the simulator and the tests do the same with no I/O.

The newest epoch has the memory that those before it have given up. When an epoch has nothing left to read, the next
one is opened with what it leaves: there is no gap between them. An epoch that all ranks have left is abandoned, and one
that nobody can ask for again leaves its receipt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.policies.interface import (
    NO_SAMPLES,
    NONE_AHEAD,
    NOTHING_CARRIED,
    Ahead,
    Answers,
    Carried,
    Orders,
    Policy,
    Read,
)
from refill_service.cache_core.rank_places import RankPlaces
from refill_service.cache_core.sample_mapping import Int64Array
from refill_service.cache_core.score_book import ScoreBook

Answered = tuple[Int64Array, Int64Array]
"""``(asked, samples)``: requests, by the samples that they asked for, and those that answered."""

_ASKED_AGAIN_EPOCHS = 2
"""Beside the newest: the one before can still be in use, and what the one before that gave can be asked for again."""


@dataclass(eq=False)
class OpenEpoch:
    """An epoch that the owner answers requests of, with its policy and the order of its ranks."""

    number: int
    policy: Policy
    traces: Traces
    abandoned: bool = False
    """Every rank has left it, with samples that nobody asked for."""

    @property
    def is_over(self) -> bool:
        return self.abandoned or self.policy.finished


class Open(NamedTuple):
    """Make room for the bytes of an epoch. What is ``carried`` becomes its own."""

    epoch: OpenEpoch
    carried: Carried
    carried_from: OpenEpoch | None


class CarryOut(NamedTuple):
    """Read and drop for an epoch."""

    epoch: OpenEpoch
    orders: Orders


class Abandon(NamedTuple):
    """Forget the bytes of an epoch; what arrives for it is thrown away."""

    epoch: OpenEpoch


class CloseBooks(NamedTuple):
    """Nobody will ask for an epoch again: leave its receipt."""

    epoch: OpenEpoch


class Wake(NamedTuple):
    """Whoever waits for an epoch is to look again whether it may open."""


Order = Open | CarryOut | Abandon | CloseBooks | Wake


class EpochState(Enum):
    """Whether an owner may answer requests of an epoch."""

    OPEN = "requests are answered"
    ENDED = "it can't be asked for any more"
    MAY_OPEN = "it opens when its traces are known"
    WAITS = "a rank has yet to finish an epoch before it"


class JobFacts(Protocol):
    """What the machine asks of a job."""

    def has_epoch(self, epoch: int) -> bool:
        """Whether the job may ask for this epoch."""
        ...

    def known_traces(self, epoch: int) -> Traces | None:
        """The traces of an epoch if they are known now."""
        ...


class OwnerMachine:
    """Decides what one pod, as the owner of its share of one live job, answers and reads. It does no I/O.

    :param ranks: where the ranks are, as the pod knows it; others may change it, too.
    :param first_sample: of the share. Policies count from there.
    :param memory_bytes: for samples, of all epochs together.
    :param new_policy: ``(epoch, traces, what is carried over)`` -> the policy of an epoch.
    :param book: of a job whose training says how important samples are.
    """

    def __init__(
        self,
        job: JobFacts,
        ranks: RankPlaces,
        first_sample: int,
        memory_bytes: int,
        new_policy: Callable[[int, Traces, Carried], Policy],
        *,
        book: ScoreBook | None = None,
    ) -> None:
        self.epochs: list[OpenEpoch] = []
        """The newest last."""
        self.ranks = ranks
        self._job = job
        self._first_sample = first_sample
        self._memory_bytes = memory_bytes
        self._new_policy = new_policy
        self._book = book
        self._closed = False
        self._orders: list[Order] = []

    # What is open.

    def known(self, number: int) -> OpenEpoch | None:
        for epoch in self.epochs:
            if epoch.number == number:
                return epoch
        return None

    def state_of(self, number: int) -> EpochState:
        """Whether requests of an epoch can be answered."""
        if self.known(number) is not None:
            return EpochState.OPEN
        if self.epochs and number < self.epochs[-1].number:
            return EpochState.ENDED
        return EpochState.MAY_OPEN if self._may_open(number) else EpochState.WAITS

    def _may_open(self, number: int) -> bool:
        """No rank may be two epochs ahead of another, which homes and ranks then forget. And those before need no more
        memory: they are used up, or every rank has left them. That nobody has asked for the epoch before here does not
        say that nobody will."""
        if self.ranks.all_entered(number):
            return True
        if not self.epochs or self.epochs[-1].number < number - 1:
            return not self.epochs and number <= self.ranks.first
        return self.ranks.all_entered(number - 1) and all(epoch.is_over for epoch in self.epochs)

    def progress(self) -> tuple[int, int] | None:
        """``(answered, all)`` requests of the epoch that the job is in, or was in last as far as is known here."""
        entered = [epoch for epoch in self.epochs if epoch.number <= self.ranks.newest]
        return (entered[-1].policy.num_answered, entered[-1].policy.num_requests) if entered else None

    def answered_of(self, epoch: OpenEpoch) -> Answered:
        asked, samples = epoch.policy.answered()
        return asked + self._first_sample, samples + self._first_sample

    def planning(self, epoch: OpenEpoch | None, asked: Int64Array | None) -> Iterator[None]:
        """As of ``Policy.planning``, but ids of the dataset. No epoch: of repeats, or before :meth:`go_on`, for which
        the newest is."""
        newest = self.epochs[-1] if self.epochs else None
        known = epoch or newest
        if known is None:
            return iter(())
        local = None if asked is None else asked - self._first_sample
        planning = known.policy.planning(local, repeats=epoch is None)
        return chain(known.policy.touching(), planning) if known.policy.untouched else planning

    def in_one_piece(self, epoch: OpenEpoch | None, asked: Int64Array) -> int:
        """As of ``Policy.in_one_piece``, but ids of the dataset. None: repeats, of which the newest epoch is told."""
        epoch = epoch or (self.epochs[-1] if self.epochs else None)
        return len(asked) if epoch is None else epoch.policy.in_one_piece(asked - self._first_sample)

    def looking_ahead(self, epoch: OpenEpoch, rank: int, ahead_from: int) -> Iterator[None]:
        """As of ``Policy.looking_ahead``."""
        return iter(()) if epoch.abandoned else epoch.policy.looking_ahead(rank, ahead_from)

    @property
    def may_go_on(self) -> bool:
        """As of ``Policy.may_go_on``, of the newest epoch."""
        return not self._closed and bool(self.epochs) and self.epochs[-1].policy.may_go_on

    # Facts.

    def go_on(self) -> list[Order]:
        """Fact: as of ``Policy.go_on``, where it :attr:`may_go_on`."""
        newest = self.epochs[-1]
        self._carry_out(newest, newest.policy.go_on())
        self._open_next()  # of what was left, all may be repeats
        return self._ordered()

    def rank_entered(self, number: int, rank: int) -> list[Order]:
        """Fact: a rank asks for this epoch now, and has left all before it."""
        if self.ranks.enters(rank, number):
            self._rank_moved_on()
        return self._ordered()

    def traces_known(self, number: int, traces: Traces) -> list[Order]:
        """Fact: an epoch that may open is asked for, and what its positions ask for is known."""
        if not self.epochs or self.epochs[-1].number < number:
            self._open(number, traces)
        return self._ordered()

    def requested(self, epoch: OpenEpoch, rank: int, asked: Int64Array) -> tuple[Answers | None, list[Order]]:
        """Fact: a rank asks for ``asked``, ids of the dataset, all different. The samples of the answer are local.
        None: the epoch is abandoned, and not all of them were answered before."""
        local = asked - self._first_sample
        if epoch.abandoned and not epoch.policy.has_answered(local):
            return None, self._ordered()
        answers = epoch.policy.requested(rank, local)
        orders = answers.orders
        if orders.reads or len(orders.drops):
            self._orders.append(CarryOut(epoch, orders))
        self._given(epoch)
        return answers, self._ordered()

    def repeated(self, samples: Int64Array) -> tuple[OpenEpoch | None, list[Order]]:
        """Fact: as of ``Policy.repeated``, but ids of the dataset, and in whichever epoch. Memory is the newest's, so
        that it is told. Returns it; None: there is none."""
        if not self.epochs:
            return None, self._ordered()
        newest = self.epochs[-1]
        self._carry_out(newest, newest.policy.repeated(samples - self._first_sample))
        return newest, self._ordered()

    def answer_left(
        self, number: int, rank: int, asked: Int64Array, ahead_from: int, room: int, started_below: int
    ) -> tuple[OpenEpoch | None, Ahead, list[Order]]:
        """Fact: an answer has left for another pod. What to send after it; parameters as of ``Policy.send_ahead``, but
        ids of the dataset."""
        epoch = self.known(number)
        if epoch is None or epoch.abandoned:
            return None, NONE_AHEAD, self._ordered()
        ahead = epoch.policy.send_ahead(rank, asked - self._first_sample, ahead_from, room, started_below)
        if not len(ahead.samples):
            return epoch, ahead, self._ordered()
        self._carry_out(epoch, ahead.orders)
        self._given(epoch)
        return epoch, ahead, self._ordered()

    def arrived(
        self, epoch: OpenEpoch, read: Read, damaged: Int64Array = NO_SAMPLES, *, pinned: bool = False
    ) -> list[Order]:
        """Fact: as of ``Policy.arrived``."""
        if not epoch.abandoned:
            self._carry_out(epoch, epoch.policy.arrived(read, damaged, pinned=pinned))
            # The last chunk may come after the last request: nobody else would open the next epoch before it is asked.
            self._open_next()
        return self._ordered()

    def failed(self, epoch: OpenEpoch, read: Read) -> list[Order]:
        """Fact: as of ``Policy.failed``."""
        self._carry_out(epoch, epoch.policy.failed(read))
        self._open_next()  # as where the last chunk comes
        return self._ordered()

    def scored(self, samples: Int64Array, scores: NDArray[np.floating]) -> list[Order]:
        """Fact: as of ``Policy.scored``, but ids of the dataset."""
        local = samples - self._first_sample
        if self._book is not None:
            self._book.scored(local, scores)
        if self.epochs:
            newest = self.epochs[-1]
            self._carry_out(newest, newest.policy.scored(local, scores))
        return self._ordered()

    def kept(self) -> Int64Array:
        """What is in memory for the epochs to come; local."""
        return self.epochs[-1].policy.kept() if self.epochs else NO_SAMPLES

    def room_is_wanted(self) -> list[Order]:
        """Fact: there is no room for new traces. What all ranks have left behind gives theirs: a rank can ask for its
        epoch and the one before."""
        oldest = self.ranks.oldest_needed
        ended = [epoch for epoch in self.epochs[:-1] if epoch.number < oldest]
        self.epochs = [epoch for epoch in self.epochs if epoch not in ended]
        self._orders += map(CloseBooks, ended)
        return self._ordered()

    @property
    def oldest_traces(self) -> int:
        """The first epoch whose traces are needed."""
        return min([self.ranks.oldest_needed, *(epoch.number for epoch in self.epochs)])

    def closed(self) -> None:
        """Fact: the job ends. Nothing is opened ahead any more."""
        self._closed = True

    # Decisions.

    def _ordered(self) -> list[Order]:
        orders = self._orders
        if orders:
            self._orders = []
        return orders

    def _carry_out(self, epoch: OpenEpoch, orders: Orders) -> None:
        if orders.reads or len(orders.drops):
            self._orders.append(CarryOut(epoch, orders))

    def _given(self, epoch: OpenEpoch) -> None:
        """Samples were given, so that an epoch needs less memory, and may be finished."""
        self._use_freed_memory()
        self._open_next()
        if epoch.policy.finished:
            self._orders.append(Wake())

    def _rank_moved_on(self) -> None:
        """An epoch that all ranks have left, with samples that nobody asked for, gives its memory to the next."""
        for before, after in pairwise(self.epochs):
            if not before.is_over and self.ranks.all_entered(after.number):
                self._abandon(before)
        self._orders.append(Wake())

    def _abandon(self, epoch: OpenEpoch) -> None:
        epoch.abandoned = True
        self._orders.append(Abandon(epoch))
        self._use_freed_memory()

    def _open_next(self) -> None:
        """Near the end of an epoch, the memory that it leaves loads for the next: no gap between them (DESIGN 4.2)."""
        newest = self.epochs[-1]
        if (
            not self._closed
            and newest.policy.nothing_left_to_read
            and all(epoch.is_over for epoch in self.epochs[:-1])
            and self.ranks.all_entered(newest.number)
            and self._job.has_epoch(newest.number + 1)
            and (traces := self._job.known_traces(newest.number + 1)) is not None
        ):
            self._open(newest.number + 1, traces)

    def _open(self, number: int, traces: Traces) -> None:
        before = self.epochs[-1] if self.epochs else None
        carried = NOTHING_CARRIED if before is None else before.policy.close()
        epoch = OpenEpoch(number, self._new_policy(number, traces, carried), traces)
        self._orders += map(CloseBooks, self.epochs[:-_ASKED_AGAIN_EPOCHS])
        self.epochs = [*self.epochs[-_ASKED_AGAIN_EPOCHS:], epoch]
        self._orders.append(Open(epoch, carried, before))
        for earlier, after in pairwise(self.epochs):
            if not earlier.is_over and self.ranks.all_entered(after.number):
                self._abandon(earlier)
        self._use_freed_memory()
        if before is None and self._book is not None:  # else its cache has them
            self._carry_out(epoch, epoch.policy.scored(*self._book.known()))
        self._orders.append(Wake())

    def _use_freed_memory(self) -> None:
        """The newest epoch gets what those before it do not hold any more."""
        newest = self.epochs[-1]
        free_bytes = self._memory_bytes
        for epoch in self.epochs:
            if epoch is not newest and not epoch.is_over:
                free_bytes -= epoch.policy.held_bytes
        orders = newest.policy.memory_changed(free_bytes)
        if orders.reads or len(orders.drops):
            self._orders.append(CarryOut(newest, orders))
