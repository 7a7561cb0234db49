"""What does a home pod ask of whom for a batch, and what does it keep of what owners send ahead?

Facts come in, decisions go out. Whoever drives it (``jobs/home.py``, a simulation, a test) fetches what is decided and
reports how that went. A batch goes this way::

    batch = home.begin(epoch, rank, positions, asked, repeats)      what was sent ahead is in it already
    batch.put(batch.own, ...)                                       from this pod's share
    batch.put(batch.repeats, ...)                                   exactly these samples
    for pod, places in batch.of_owners.items():
        request = home.ask(batch, pod, places)                      with the room that its owner may send ahead into
        home.announced(request, positions)                          what its answer will send ahead
        batch.put(places, ...)                                      what was asked for
        home.ended(request, sent_ahead)                             whatever became of it
    for pod, places in home.arrived(batch).items(): ...             when all of batch.awaited have ended
    home.complete(batch); home.over(batch)

A position is *started* when the rank can't be helped any more by sending it ahead: it was answered, or an owner was
asked for it. What comes ahead for a started position is refused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from refill.protocol.position_set import PositionSet
from refill.protocol.wire_format import BatchRequest
from refill_service.cache_core.sample_mapping import Int64Array
from refill_service.cache_core.skipped_positions import JudgedEpochs, skipped_for_good

Payload = TypeVar("Payload")
Request = tuple[int, int, int]
"""``(epoch, rank, position)``"""


@dataclass
class HomeCounts:
    """Where one epoch's requests of a home pod's ranks were answered."""

    local: int = 0
    """From the pod's own share."""
    remote_memory: int = 0
    """By samples sent ahead."""
    remote_on_demand: int = 0
    """By an owner that was asked: the papers' remote requests."""
    repeats: int = 0
    """Positions that repeat a sample of the epoch (padding, replacement); one that is asked for again counts once."""
    ahead_received: int = 0
    ahead_refused: int = 0
    """Sent ahead and dropped: the rank had been answered otherwise, or the owner had no room for it."""
    batches: int = 0
    delivered_bytes: int = 0


_NO_PLACES: Int64Array = np.empty(0, dtype=np.int64)
_FIRST_PLACE: Int64Array = np.zeros(1, dtype=np.int64)


class Entry(Enum):
    """Names the owners that have to learn that a rank enters an epoch, before it gets samples of it."""

    KNOWN = "none: all owners know that the rank is in it, or in a later one"
    MOVES_ON = "every owner, so that none waits for the rank in an earlier one"
    COMES = "every owner, once all pods agree that this process is the rank: it comes from elsewhere, or is new"


class SentAhead(NamedTuple, Generic[Payload]):
    """A sample that an owner sent for a later request."""

    position: int
    sample_id: int
    num_bytes: int
    payload: Payload


class Kept(NamedTuple):
    """What became of the samples that an answer sent ahead."""

    kept: int
    refused: int


@dataclass(slots=True)
class _Asking:
    """What a rank asks of an epoch here."""

    started: PositionSet = field(default_factory=PositionSet)
    largest_batch: int = 0
    under_way: int = 0
    """Batches that are being assembled."""
    most_under_way: int = 0
    """As many as the rank has workers that ask."""
    epoch_left: bool = False
    """The rank asks for a later epoch by way of another home."""

    def has_started(self, position: int) -> bool:
        return self.started.has_any(position, position + 1)

    @property
    def started_below(self) -> int:
        """The rank has asked for every position below this one."""
        missing = self.started.first_missing(0, self.started.end)
        return self.started.end if missing is None else missing[0]


class Batch(Generic[Payload]):
    """A batch in the making. All arrays have an entry for each position; *places* are indices into them.

    :param own: places that this pod's share answers.
    :param repeats: places that repeat a sample of the epoch, and get exactly that.
    :param of_owners: by pod, places to ask it for.
    """

    __slots__ = (
        "_missing",
        "arriving",
        "asked",
        "asking",
        "awaited",
        "epoch",
        "found",
        "num_sent_ahead",
        "of_owners",
        "own",
        "positions",
        "rank",
        "repeats",
        "sample_ids",
    )

    def __init__(self, epoch: int, rank: int, positions: Int64Array, asked: Int64Array, asking: _Asking) -> None:
        self.epoch = epoch
        self.rank = rank
        self.positions = positions
        self.asked = asked
        self.asking = asking
        self.own: Int64Array
        self.repeats: Int64Array
        self.of_owners: dict[int, Int64Array] = {}
        self.awaited: dict[OwnerRequest, None] = {}
        """Requests under way that bring what the batch asks for, ahead of it."""
        self.arriving: list[int] = []
        """The places that they bring."""
        self.num_sent_ahead = 0
        """Places that remote memory answered."""
        self.sample_ids = np.empty(len(positions), dtype=np.int64)
        self.found: list[Payload | None] = [None] * len(positions)
        """The samples so far."""
        self._missing = len(positions)

    def put(self, places: Int64Array, sample_ids: Int64Array, payloads: Sequence[Payload]) -> None:
        """Fact: these answer the places. Raises RuntimeError for one that has its sample already, and when there are
        not as many samples as places."""
        if not len(places) == len(sample_ids) == len(payloads):
            raise RuntimeError(
                f"{len(places)} positions of rank {self.rank} were answered by {len(sample_ids)} samples"
            )
        self.sample_ids[places] = sample_ids
        for place, payload in zip(places.tolist(), payloads, strict=True):
            self._put(place, payload)

    def put_sent_ahead(self, place: int, sample_id: int, payload: Payload) -> None:
        self.sample_ids[place] = sample_id
        self._put(place, payload)
        self.num_sent_ahead += 1

    def _put(self, place: int, payload: Payload) -> None:
        if self.found[place] is not None:
            raise RuntimeError(f"position {self.positions[place]} of rank {self.rank} was answered twice")
        self.found[place] = payload
        self._missing -= 1

    @property
    def payloads(self) -> list[Payload]:
        """The samples, in the order of the positions. Raises RuntimeError when some are missing."""
        if self._missing:
            raise RuntimeError(f"batch of rank {self.rank} was assembled with {self._missing} samples missing")
        return cast(list[Payload], self.found)


@dataclass(eq=False, slots=True)
class OwnerRequest:
    """One request of a home to an owner."""

    pod: int
    wire: BatchRequest
    asking: _Asking
    announced: list[int] = field(default_factory=list)
    """Positions that its answer sends ahead."""


class HomeMachine(Generic[Payload]):
    """One pod as the home of some ranks of one job.

    :param owner_bounds: ``(pods + 1,)`` pod ``i`` owns the samples from ``owner_bounds[i]`` to ``owner_bounds[i + 1]``.
    :param remote_memory_bytes: what it can hold of what owners send ahead.
    """

    def __init__(self, pod: int, owner_bounds: Int64Array, remote_memory_bytes: int) -> None:
        self.remote_memory: RemoteMemory[tuple[int, Payload]] = RemoteMemory(remote_memory_bytes)
        self.history: dict[int, HomeCounts] = {}
        self._pod = pod
        self._num_pods = len(owner_bounds) - 1
        self._ends = owner_bounds[1:-1]
        self._end_list: list[int] = self._ends.tolist()
        self._entered: dict[int, int] = {}
        """By rank, the latest epoch that it entered here and that all owners know of."""
        self._judged = JudgedEpochs()
        self._asking: dict[tuple[int, int], _Asking] = {}
        self._arriving: dict[tuple[int, int, int], OwnerRequest] = {}
        """Requests (epoch, rank, position) whose samples an owner has announced and is sending."""
        self._never_asked: Counter[tuple[int, int]] = Counter()
        """Samples sent ahead for (epoch, rank) that it left without asking for them."""

    # A rank comes, moves on and goes

    def entry(self, epoch: int, rank: int) -> Entry:
        """Which owners have to learn that a rank asks for an epoch."""
        latest = self._entered.get(rank)
        if latest is None:
            return Entry.COMES
        return Entry.KNOWN if latest >= epoch else Entry.MOVES_ON

    def entered(self, epoch: int, rank: int) -> None:
        """Fact: all owners know that a rank asks for an epoch here. It has left the epochs before, but may repeat a
        request of the last one."""
        self._judged.comes(rank, epoch)
        self._entered[rank] = max(epoch, self._entered.get(rank, -1))
        self._never_asked_before(epoch, rank)
        for key in [known for known in self._asking if known[1] == rank and known[0] < epoch - 1]:
            del self._asking[key]

    def left(self, epoch: int, rank: int) -> None:
        """Fact: a rank asks for this epoch by way of another home, which gets from the owners what was sent ahead here
        for it. What was sent for epochs before, nobody will ask for. If the rank comes back, the owners have to learn
        it again, so that they send again what was sent ahead there."""
        self._judged.left(rank, epoch)
        self._entered.pop(rank, None)
        self._never_asked_before(epoch, rank)
        self.remote_memory.forget(rank, before_epoch=epoch + 1)
        for key in [known for known in self._asking if known[1] == rank]:
            # What is still on its way is refused.
            self._asking.pop(key).epoch_left = key[0] < epoch

    def _never_asked_before(self, epoch: int, rank: int) -> None:
        for old, never_asked in self.remote_memory.forget(rank, before_epoch=epoch).items():
            self._never_asked[old, rank] += never_asked

    def skipped(self, rank: int, before_epoch: int) -> tuple[int, int, int] | None:
        """``(epoch, start, end)`` of positions that a rank which asks for an epoch has left out of one before."""
        if self._entered.get(rank, -1) >= before_epoch:
            return None
        for epoch in sorted(epoch for epoch, of_rank in self._asking if of_rank == rank and epoch < before_epoch):
            asking = self._asking[epoch, rank]
            gap = skipped_for_good(asking.started, asking.largest_batch)
            if gap is not None and self._judged(rank, epoch):
                return epoch, *gap
        return None

    # A batch

    def begin(
        self, epoch: int, rank: int, positions: Int64Array, asked: Int64Array, repeats: NDArray[np.bool_]
    ) -> Batch[Payload]:
        """Fact: a rank asks for positions, all different. Decides from where each of them is answered.

        :param asked: the sample that each position asks for.
        :param repeats: whether it repeats a sample of the epoch.
        """
        asking = self._asking.get((epoch, rank))
        if asking is None:
            asking = self._asking[epoch, rank] = _Asking()
        asking.largest_batch = max(asking.largest_batch, len(positions))
        asking.under_way += 1
        asking.most_under_way = max(asking.most_under_way, asking.under_way)
        batch: Batch[Payload] = Batch(epoch, rank, positions, asked, asking)
        if len(positions) == 1:
            self._begin_one(batch, repeats)
            return batch
        wanted = ~repeats
        batch.repeats = repeats.nonzero()[0]
        if len(batch.repeats):
            repeated = positions[batch.repeats].tolist()
            self.counts(epoch).repeats += sum(not asking.has_started(each) for each in repeated)
        if self._num_pods == 1:
            batch.own = wanted.nonzero()[0]
            asking.started.add_all(positions)
            return batch
        owners = self._owners(asked)
        mine = owners == self._pod
        batch.own = (wanted & mine).nonzero()[0]
        wanted &= ~mine
        if len(self.remote_memory) or self._arriving:
            for place in wanted.nonzero()[0].tolist():
                request = (epoch, rank, int(positions[place]))
                if (found := self.remote_memory.take(request)) is not None:
                    batch.put_sent_ahead(place, *found)
                    wanted[place] = False
                elif (bringer := self._arriving.get(request)) is not None:
                    batch.awaited[bringer] = None
                    batch.arriving.append(place)
                    wanted[place] = False
        asking.started.add_all(np.delete(positions, batch.arriving) if batch.arriving else positions)
        batch.of_owners = _by_owner(wanted.nonzero()[0], owners[wanted])
        return batch

    def _begin_one(self, batch: Batch[Payload], repeats: NDArray[np.bool_]) -> None:
        """The same for a single position, which simulations ask for by the million: numpy is slow with one value."""
        batch.own = batch.repeats = _NO_PLACES
        pod = bisect_right(self._end_list, batch.asked.item())
        if repeats.item():
            batch.repeats = _FIRST_PLACE
            self.counts(batch.epoch).repeats += not batch.asking.has_started(batch.positions.item())
        elif pod == self._pod:
            batch.own = _FIRST_PLACE
        else:
            request = (batch.epoch, batch.rank, batch.positions.item())
            if (found := self.remote_memory.take(request)) is not None:
                batch.put_sent_ahead(0, *found)
            elif (bringer := self._arriving.get(request)) is not None:
                batch.awaited[bringer] = None
                batch.arriving.append(0)
                return
            else:
                batch.of_owners = {pod: _FIRST_PLACE}
        batch.asking.started.add_all(batch.positions)

    def ask(self, batch: Batch[Payload], pod: int, places: Int64Array, owners_left: int = 1) -> OwnerRequest:
        """The request to an owner for these places; another one each time that it is asked.

        :param owners_left: how many owners are asked together that have yet to be granted room, this one among them.
        """
        started = batch.asking.started
        # While the owner answers, the rank's other workers come with the batches that follow: what they ask for
        # on demand would cross with what is sent ahead.
        others = batch.asking.most_under_way - 1
        ahead_from = started.end + others * len(batch.positions)
        room = self.remote_memory.grant(owners_left)
        wire = BatchRequest(
            batch.epoch, batch.rank, batch.positions[places], room, batch.asking.started_below, ahead_from
        )
        return OwnerRequest(pod, wire, batch.asking)

    def announced(self, request: OwnerRequest, positions: Int64Array) -> None:
        """Fact: an owner will send samples ahead for these positions. Who asks for one of them waits for it."""
        epoch, rank = request.wire.epoch, request.wire.rank
        request.announced = positions.tolist()
        for position in request.announced:
            self._arriving[epoch, rank, position] = request

    def ended(self, request: OwnerRequest, sent_ahead: Iterable[SentAhead[Payload]] = ()) -> Kept:
        """Fact: the answer to a request has ended, well or badly, and brought this ahead."""
        epoch, rank = request.wire.epoch, request.wire.rank
        for position in request.announced:
            if self._arriving.get((epoch, rank, position)) is request:
                del self._arriving[epoch, rank, position]
        # A position that was asked for on demand meanwhile has been answered, and a rank that has left asks elsewhere:
        # nobody would come for it.
        is_here = self._asking.get((epoch, rank)) is request.asking
        sent, asking = list(sent_ahead), request.asking
        if asking.epoch_left and (late := sum(not asking.has_started(each.position) for each in sent)):
            self._never_asked[epoch, rank] += late
        kept = self.remote_memory.settle(
            request.wire.room_bytes,
            (
                ((epoch, rank, each.position), each.num_bytes, (each.sample_id, each.payload))
                for each in sent
                if is_here and not asking.has_started(each.position)
            ),
        )
        counts = self.counts(epoch)
        counts.ahead_received += kept
        counts.ahead_refused += len(sent) - kept
        return Kept(kept, len(sent) - kept)

    def arrived(self, batch: Batch[Payload]) -> dict[int, Int64Array]:
        """Fact: all that the batch awaited has ended. By pod, the places to ask it for: what was lost on the way."""
        lost = []
        for place in batch.arriving:
            if (found := self.remote_memory.take((batch.epoch, batch.rank, int(batch.positions[place])))) is not None:
                batch.put_sent_ahead(place, *found)
            else:
                lost.append(place)
        batch.asking.started.add_all(batch.positions[batch.arriving])
        places = np.array(lost, dtype=np.int64)
        return _by_owner(places, self._owners(batch.asked[places]))

    def complete(self, batch: Batch[Payload], delivered_bytes: int) -> None:
        """Fact: the batch is on its way to the rank, with all its samples."""
        counts = self.counts(batch.epoch)
        counts.local += len(batch.own)
        counts.remote_memory += batch.num_sent_ahead
        counts.remote_on_demand += len(batch.positions) - len(batch.own) - len(batch.repeats) - batch.num_sent_ahead
        counts.batches += 1
        counts.delivered_bytes += delivered_bytes

    def over(self, batch: Batch[Payload]) -> None:
        """Fact: the batch is complete, or was given up."""
        batch.asking.under_way -= 1

    def _owners(self, samples: Int64Array) -> Int64Array:
        return self._ends.searchsorted(samples, side="right")

    # What is known of an epoch

    def counts(self, epoch: int) -> HomeCounts:
        counts = self.history.get(epoch)
        if counts is None:
            counts = self.history[epoch] = HomeCounts()
        return counts

    def asked_of(self, epoch: int, rank: int) -> PositionSet | None:
        """What a rank has asked of an epoch; None when this pod may not know all of it."""
        asking = self._asking.get((epoch, rank)) if self._judged(rank, epoch) else None
        return None if asking is None else asking.started

    def positions_under_way(self, epoch: int, rank: int) -> int:
        """At most so many are being answered."""
        asking = self._asking.get((epoch, rank))
        return 0 if asking is None else asking.under_way * asking.largest_batch

    def unused_ahead(self, epoch: int) -> dict[int, int]:
        """How many samples of an epoch were sent ahead to each rank that it has not come to, or never came to."""
        unused = self.remote_memory.held(epoch)
        for (of_epoch, rank), count in self._never_asked.items():
            if of_epoch == epoch:
                unused[rank] += count
        return dict(unused)

    def books_closed(self, epoch: int) -> None:
        """Fact: nobody will ask for the receipt's part of an epoch again."""
        for key in [key for key in self._never_asked if key[0] == epoch]:
            del self._never_asked[key]


def _by_owner(places: Int64Array, owners: Int64Array) -> dict[int, Int64Array]:
    pods = np.unique(owners).tolist() if len(owners) > 1 else owners.tolist()
    return {pod: places[owners == pod] for pod in pods}


MOST_NAMED = 1000
"""Of an epoch, at one pod. A sample beyond counts each time that it is reported."""
MOST_EPOCHS = 8
"""More can't be asked for at once; ranks say which they are in."""


class DamagedSamples:
    """Counts, for each epoch of one job, the damaged samples that ranks went on without, and names the first of
    them."""

    def __init__(self) -> None:
        self._named: dict[int, dict[int, int]] = {}
        """By epoch, ranks by sample."""
        self._unnamed: dict[int, Counter[int]] = {}
        """By epoch, how many more each rank had."""
        self.total = 0

    def rank_goes_without(self, epoch: int, rank: int, samples: Iterable[int]) -> None:
        """Fact: a rank went on without these. It may report them again."""
        named = self._named.setdefault(epoch, {})
        while len(self._named) > MOST_EPOCHS:
            self.forget(min(self._named))
        for sample in samples:
            if sample in named:
                continue
            self.total += 1
            if len(named) < MOST_NAMED:
                named[sample] = rank
            else:
                self._unnamed.setdefault(epoch, Counter())[rank] += 1

    def by_rank(self, epoch: int) -> dict[int, int]:
        return dict(Counter(self._named.get(epoch, {}).values()) + self._unnamed.get(epoch, Counter()))

    def named(self, epoch: int) -> list[int]:
        return sorted(self._named.get(epoch, ()))

    def forget(self, epoch: int) -> None:
        """Fact: its receipt is written."""
        self._named.pop(epoch, None)
        self._unnamed.pop(epoch, None)


class RemoteMemory(Generic[Payload]):
    """Samples sent ahead for the ranks of one job at one home pod, each kept for the request that it answers (Redox
    3.8, Brand 3.4). Room is *granted* to an owner with each request and stays reserved until its answer is settled, so
    that owners who answer at the same time can't exceed the limit together.

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
