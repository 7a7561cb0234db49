"""What do epochs do, with no I/O? Every owner and home machine of a job; ranks ask for their batches in turn.

What a pod's shell carries out with a store and a network is carried out here at once: what an owner reads has arrived
before anybody asks again, and so has what it sends ahead. ``simulated_job.py`` and the
programs in ``benchmarks/papers`` drive the machines of pods by way of this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.home_machine import HomeMachine, SentAhead
from refill_service.cache_core.owner_machine import CarryOut, OpenEpoch, Order, OwnerMachine
from refill_service.cache_core.policies.interface import Ahead, Carried, EpochBegan, EpochCounts, Policy, Read
from refill_service.cache_core.policies.registry import new_policy
from refill_service.cache_core.rank_places import RankPlaces
from refill_service.cache_core.sample_mapping import AbstractMapping, Int64Array

_BLOCK = 1 << 16
"""Positions of a rank whose samples are looked up at once."""


class _Epochs:
    """What the machine asks of a job."""

    def __init__(self, traces: Sequence[Traces]) -> None:
        self._traces = traces

    def has_epoch(self, epoch: int) -> bool:
        return epoch < len(self._traces)

    def known_traces(self, epoch: int) -> Traces:
        return self._traces[epoch]


class LocalOwner:
    """An owner whose reads arrive at once. Its epoch 0 is open.

    :param traces: of each epoch of the job; those that are appended later are not known before.
    :param lengths: ``(samples of the share,)`` bytes of each.
    :param memory_bytes: for samples.
    :param settings: all of the policy's own.
    """

    def __init__(
        self,
        policy: str,
        mapping: AbstractMapping,
        traces: Sequence[Traces],
        world_size: int,
        lengths: Int64Array,
        memory_bytes: int,
        *,
        window: int = 0,
        key: str = "",
        settings: Mapping[str, Any],
    ) -> None:
        self.mapping = mapping
        self._lengths = lengths
        self._first_sample = mapping.share.first_sample
        self._traces = traces
        self._num_ranks = world_size

        def policy_of(epoch: int, of_epoch: Traces, carried: Carried) -> Policy:
            began = EpochBegan(
                mapping,
                of_epoch,
                lengths,
                prefetch_window=window,
                key=f"{key} {epoch}" if epoch else key,
                settings=dict(settings),
                carried=carried,
                next_traces=traces[epoch + 1] if epoch + 1 < len(traces) else None,
            )
            return new_policy(policy, began)

        self.machine = OwnerMachine(
            _Epochs(traces), RankPlaces(world_size), self._first_sample, memory_bytes, policy_of
        )
        self.begin(0)

    def begin(self, number: int) -> None:
        """Fact: all ranks enter this epoch."""
        for rank in range(self._num_ranks):
            self.carry_out(self.machine.rank_entered(number, rank))
        self.carry_out(self.machine.traces_known(number, self._traces[number]))
        epoch = self.machine.known(number)
        if epoch is None:
            raise RuntimeError(f"epoch {number} was not opened")
        self.epoch = epoch
        """That ranks are in."""
        self._go_on()

    @property
    def counts(self) -> EpochCounts:
        """Of the epoch that ranks are in."""
        return self.epoch.policy.counts

    def requested(self, rank: int, asked: Int64Array) -> Int64Array:
        """The samples that answer these requests."""
        answers, orders = self.machine.requested(self.epoch, rank, asked)
        if answers is None:
            raise RuntimeError("an epoch was abandoned that ranks are in")
        if orders:
            self.carry_out(orders)
        self._go_on()
        return answers.samples + self._first_sample

    def repeated(self, samples: Int64Array) -> None:
        """Positions that repeat these ask for them."""
        here = samples[self.mapping.share.holds(samples)]
        if len(here):
            self.carry_out(self.machine.repeated(here)[1])
            self._go_on()

    def answer_left(self, rank: int, asked: Int64Array, ahead_from: int, room: int, started_below: int) -> Ahead:
        _, ahead, orders = self.machine.answer_left(self.epoch.number, rank, asked, ahead_from, room, started_below)
        self.carry_out(orders)
        self._go_on()
        return ahead

    def sent(self, ahead: Ahead) -> list[SentAhead[int]]:
        """As the home gets them."""
        samples = (ahead.samples + self._first_sample).tolist()
        sizes = self._lengths[ahead.samples].tolist()
        return list(map(SentAhead, ahead.positions.tolist(), samples, sizes, samples))

    def _go_on(self) -> None:
        while self.machine.may_go_on:
            self.carry_out(self.machine.go_on())

    def carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            if type(order) is CarryOut:
                for read in order.orders.reads:
                    self._order(order.epoch, read)

    def _order(self, epoch: OpenEpoch, read: Read) -> None:
        """A read that is to be made."""
        self._arrived(epoch, read)

    def _arrived(self, epoch: OpenEpoch, read: Read) -> None:
        self.carry_out(self.machine.arrived(epoch, read))


def epoch_in_lockstep(
    owners: Sequence[LocalOwner],
    homes: Sequence[HomeMachine[int]],
    traces: Traces,
    batch_size: int,
    epoch: int = 0,
) -> Iterator[tuple[int, Int64Array, Int64Array]]:
    """``(rank, positions, samples)`` of every batch of an epoch, without repeats; one rank for each home."""
    if epoch:
        for rank, home in enumerate(homes):
            home.entered(epoch, rank)
        for owner in owners:
            owner.begin(epoch)
    length = traces.length(0)
    block = max(1, _BLOCK // batch_size) * batch_size
    for start in range(0, length, block):
        # Many at once: to look up a single place of a keyed permutation takes as long as a thousand.
        positions = np.arange(start, min(start + block, length), dtype=np.int64)
        of_ranks = [traces.asked(rank, positions) for rank in range(len(homes))]
        for first in range(0, len(positions), batch_size):
            part = slice(first, first + batch_size)
            for rank, (asked, repeats) in enumerate(of_ranks):
                yield ask_batch(owners, homes[rank], epoch, rank, positions[part], asked[part], repeats[part])


def ask_batch(
    owners: Sequence[LocalOwner],
    home: HomeMachine[int],
    epoch: int,
    rank: int,
    positions: Int64Array,
    asked: Int64Array,
    repeats: NDArray[np.bool_],
) -> tuple[int, Int64Array, Int64Array]:
    """``(rank, positions, samples)`` of one batch, without repeats. Owners may answer with samples that have yet to
    arrive.

    :param home: of the rank, pod ``rank % pods``.
    """
    batch = home.begin(epoch, rank, positions, asked, repeats)
    if len(batch.own):
        samples = owners[rank % len(owners)].requested(rank, asked if len(asked) == 1 else asked[batch.own])
        batch.put(batch.own, samples, samples.tolist())
    owners_left = len(batch.of_owners)
    for pod, places in batch.of_owners.items():
        owner, wanted = owners[pod], asked if len(asked) == 1 else asked[places]
        request = home.ask(batch, pod, places, owners_left)
        owners_left -= 1
        samples = owner.requested(rank, wanted)
        batch.put(places, samples, samples.tolist())
        wire = request.wire
        ahead = owner.answer_left(rank, wanted, wire.ahead_from, wire.room_bytes, wire.started_below)
        home.ended(request, owner.sent(ahead) if len(ahead.samples) else ())
    if len(batch.repeats):
        repeated = asked[batch.repeats]
        for owner in owners:
            owner.repeated(repeated)
        batch.put(batch.repeats, repeated, repeated.tolist())
        positions, sample_ids = positions[~repeats], batch.sample_ids[~repeats]
    else:
        sample_ids = batch.sample_ids
    home.complete(batch, 0)
    home.over(batch)
    return rank, positions, sample_ids
