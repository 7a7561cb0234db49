"""By which dealing do ranks go through an epoch, what have they asked for, and what do they say they received?

No sample is answered by this: it is for receipts, and to tell loops that something is wrong. Positions here are those
of a rank, as an epoch, or what is left of it, is dealt (:mod:`refill.protocol.dealing`). An epoch that is dealt anew
was had up to where the new dealing starts, as the checkpoint says that it goes on from.

All ranks must go by one dealing, or some samples would come twice and some never. Those that load states of different
steps don't, and those whose loaders make batches of different sizes. Then the dealing that began last stands, since
those before may be of processes that have been forgotten; who still asks by one of these is refused as long as ranks of
the other live.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from refill.errors import InvalidInput
from refill.protocol.dealing import Dealing
from refill.protocol.keyed_hash import key_of
from refill.protocol.position_set import PositionSet, spans_of
from refill.protocol.rank_life import RankLife
from refill.protocol.receipt_digest import DigestPart, merged_parts
from refill_service.cache_core.sample_mapping import Int64Array

_KEPT_EPOCHS = 300
_KEPT_WHOLE = 3
_MOST_SPANS = 1 << 16
"""Of one rank and epoch: a loader's workers leave a span for each batch that is under way, or was left out."""
_MOST_PARTS = 8
"""Of a digest, of one rank: each process that goes on without its own state begins one."""
_KEPT_DEALINGS = 4
"""Of an epoch."""
_BYTES_OF_EPOCH, _BYTES_OF_RANK, _BYTES_OF_SPAN = 2000, 600, 100
"""What Python takes for each, and for each damaged sample or list about as much as for a span, or less."""
_LIVES_SECONDS = 10.0
"""A rank that has asked for nothing for so long may be gone."""
_LATER_SECONDS = 0.001
"""What ranks begin to go by is later than what they went by before by so much, whatever the clock says."""


@dataclass
class EpochReceived:
    """Notes what each rank asked for and received of one epoch, which is dealt in one way."""

    dealing: Dealing
    since: float
    """When ranks began to go by it, by the clock."""
    asked_at: dict[int, tuple[float, RankLife | None]] = field(default_factory=dict)
    """When each process has asked last, at this pod or for what this pod has, and which run of it."""
    refused_at: dict[int, float] = field(default_factory=dict)
    """When each process was refused for the first time, since others go by a later dealing."""
    asked: dict[int, PositionSet] = field(default_factory=dict)
    is_all_noted: bool = True
    """Whether these are all positions that ranks have asked for: there may have been no room for some."""
    largest_batch: int = 0
    """Positions that were asked for at once."""
    received: dict[int, PositionSet] = field(default_factory=dict)
    damaged: dict[int, dict[int, int]] = field(default_factory=dict)
    """Samples that ranks went on without, by their positions."""
    lists: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Where ranks ask by lists of their own: how long each is, and its digest."""
    digests: dict[tuple[int, int, int, bool, int], list[DigestPart]] = field(default_factory=dict)
    """What loops say that they have had, by rank and dealing: this one, and others before the state that they go on
    from."""

    used_bytes: int = 0
    """Of what is known of ranks, about."""

    def life_of(self, process: int) -> RankLife | None:
        return self.asked_at.get(process, (0.0, None))[1]

    def copy(self) -> EpochReceived:
        """Of what :meth:`to_dict` tells, for another thread."""
        return replace(
            self,
            received={rank: found.copy() for rank, found in self.received.items()},
            damaged={rank: found.copy() for rank, found in self.damaged.items()},
            lists=self.lists.copy(),
            digests=self.digests.copy(),
        )

    def to_dict(self, *, packed: bool = False) -> dict[str, Any]:
        """:param packed: spans are written as :func:`packed_spans` does it."""
        dealing = self.dealing
        return {
            "dealing": [dealing.num_positions, dealing.num_ranks, dealing.batch, dealing.start, dealing.drop_last],
            "since": self.since,
            "received": {rank: packed_spans(found) if packed else list(found) for rank, found in self.received.items()},
            "damaged": {rank: list(found.items()) for rank, found in self.damaged.items()},
            "lists": self.lists,
            "digests": [part.to_list() for found in self.digests.values() for part in found],
        }


class Overtaken(NamedTuple):
    """A process goes through an epoch by an earlier dealing than another one that lives."""

    by: int
    dealing: Dealing
    for_good: bool
    """Whether it went by its own when the other one began with this, which goes on asking: it is no process that goes
    back, and the other none that only looked."""


class ReceivedEpochs:
    """Keeps these notes for the epochs of one planned job at one pod.

    :param limit_bytes: that it may take, about. Old epochs are forgotten for it; of the newest what ranks say beyond it
        is not kept, and stays unconfirmed.
    """

    def __init__(self, limit_bytes: int = 1 << 60) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.num_damaged = 0
        """Samples that ranks went on without, of all epochs."""
        self._epochs: dict[int, dict[Dealing, EpochReceived]] = {}
        self._last_forgotten = -1
        """Of the epochs."""
        self._contested: set[int] = set()
        """Of these, those that two processes go through by two dealings, as far as can be told."""

    def of(self, epoch: int) -> EpochReceived | None:
        """By the dealing that stands; None: nothing is known of the epoch."""
        dealings = self._epochs.get(epoch)
        return None if dealings is None else max(dealings.values(), key=lambda found: found.since)

    @property
    def epochs(self) -> list[int]:
        """Those known, ascending."""
        return sorted(self._epochs)

    @property
    def newest(self) -> int:
        """-1: none."""
        return max(self._epochs, default=-1)

    @property
    def num_ranks(self) -> int:
        """Of the newest epoch, as far as they have said something."""
        now = self.of(self.newest)
        return 0 if now is None else len(now.received)

    def of_ranks(self) -> dict[int, int]:
        """By rank, how many of its positions of the newest epoch it has received, as far as this pod was told; of ranks
        that were in the one before, too."""
        now, before = self.of(self.newest), self.of(self.newest - 1)
        if now is None:
            return {}
        ranks = {*now.received, *(() if before is None else before.received)}
        counts = {rank: now.received.get(rank, PositionSet()).count for rank in ranks}
        return {rank: counts[rank] for rank in sorted(counts) if rank < now.dealing.num_ranks}

    def goes_by(
        self, epoch: int, dealing: Dealing, process: int, now: float, life: RankLife | None = None
    ) -> Overtaken | None:
        """Fact: a process of a rank asks for samples of an epoch. Returns another one that lives and goes by a later
        dealing: then this one is to be refused. None: there is none. Here and below, ``now`` is the time by the clock.

        :param process: its number; of each rank there may be several.
        """
        stands = self.of(epoch)
        if stands is None or stands.dealing != dealing:
            earlier = self._epochs.get(epoch, {}).get(dealing)
            if stands is not None and earlier is not None:
                goes_on = life is not None and earlier.life_of(process) == life != stands.life_of(process)
                for other, (at, _) in stands.asked_at.items():
                    if other != process and abs(now - at) <= _LIVES_SECONDS:  # the clock may have been set back
                        first_refused = earlier.refused_at.setdefault(process, now)
                        both_live = at > first_refused or epoch in self._contested
                        return Overtaken(other, stands.dealing, for_good=goes_on and both_live)
                if goes_on:  # the other may wait for this one, and come again
                    self._contested.add(epoch)
                self.used_bytes -= self._epochs[epoch].pop(dealing).used_bytes  # ranks have gone back to it
            stands = self._at(epoch, dealing, now if stands is None else max(now, stands.since + _LATER_SECONDS))
        if process in stands.asked_at or self._has_room(stands, _BYTES_OF_RANK):
            stands.asked_at[process] = now, life
        return None

    def _at(self, epoch: int, dealing: Dealing, now: float) -> EpochReceived:
        """What is known of an epoch that is dealt so."""
        if epoch not in self._epochs:
            self._epochs[epoch] = {}
            kept = sorted(self._epochs)
            for old in kept[:-_KEPT_EPOCHS]:
                self._forget(old)
            for old in kept[:-_KEPT_WHOLE]:
                self._forget_asked(old)
        dealings = self._epochs.setdefault(epoch, {})
        if dealing not in dealings:
            others = sorted(dealings, key=lambda each: dealings[each].since)
            for oldest in others[: 1 - _KEPT_DEALINGS]:
                self.used_bytes -= dealings.pop(oldest).used_bytes
            was_forgotten = epoch <= self._last_forgotten or epoch < sorted(self._epochs)[-_KEPT_WHOLE:][0]
            dealings[dealing] = EpochReceived(dealing, now, is_all_noted=not was_forgotten)
        return dealings[dealing]

    def _count(self, found: EpochReceived, more_bytes: int) -> None:
        found.used_bytes += more_bytes
        self.used_bytes += more_bytes

    def _forget_asked(self, epoch: int) -> None:
        for found in self._epochs.get(epoch, {}).values():
            num_spans = sum(map(len, found.asked.values()))
            self._count(found, -_BYTES_OF_RANK * len(found.asked) - _BYTES_OF_SPAN * num_spans)
            found.asked.clear()
            found.is_all_noted = False

    def are_over(self) -> None:
        """Fact: the job has ended. What receipts don't say is forgotten."""
        for epoch in self._epochs:
            self._forget_asked(epoch)

    @property
    def kept_bytes(self) -> int:
        """What all of it takes, about."""
        return self.used_bytes + _BYTES_OF_EPOCH * len(self._epochs)

    def forget_oldest(self) -> None:
        """Of the epochs, at least one."""
        self._forget(min(self._epochs))

    def _forget(self, epoch: int) -> None:
        for found in self._epochs.pop(epoch).values():
            self.used_bytes -= found.used_bytes
        self._contested.discard(epoch)
        self._last_forgotten = max(self._last_forgotten, epoch)

    def _has_room(self, found: EpochReceived, more_bytes: int) -> bool:
        """For so much of ranks, where there is, or old epochs make some. It is counted then."""
        while self.used_bytes + more_bytes > self.limit_bytes and len(self._epochs) > 1:
            oldest = min(self._epochs)
            if found in self._epochs[oldest].values():
                break
            self._forget(oldest)
        if self.used_bytes + more_bytes > self.limit_bytes:
            return False
        self._count(found, more_bytes)
        return True

    def comes_to(self, epoch: int, rank: int) -> bool:
        """Whether a rank that has asked for the epoch before asks for this one for the first time."""
        before, now = self.of(epoch - 1), self.of(epoch)
        return before is not None and rank in before.asked and (now is None or rank not in now.asked)

    def asked_of(self, epoch: int, rank: int) -> tuple[PositionSet, int, bool]:
        """What a rank has asked for of an epoch; the most at once; and whether that is known to be all of it."""
        found = self.of(epoch)
        if found is None:
            return PositionSet(), 0, epoch > self._last_forgotten
        return found.asked.get(rank, PositionSet()), found.largest_batch, found.is_all_noted

    def asks(self, epoch: int, dealing: Dealing, rank: int, positions: Int64Array, had: int = 0, *, now: float) -> None:
        """Fact: a rank asks for ``(n,)`` of its positions; those below ``had`` lie in a checkpoint that it goes on
        from."""
        found = self._at(epoch, dealing, now)
        found.largest_batch = max(found.largest_batch, len(positions))
        if rank not in found.asked and not self._has_room(found, _BYTES_OF_RANK):
            found.is_all_noted = False
            return
        asked = found.asked.setdefault(rank, PositionSet())
        before, spans = len(asked), spans_of(positions)
        asked.add(0, had)
        if before < _MOST_SPANS and self._has_room(found, _BYTES_OF_SPAN * len(spans)):
            self._count(found, -_BYTES_OF_SPAN * len(spans))
            asked.add_spans(spans)
        else:
            found.is_all_noted = False
        self._count(found, _BYTES_OF_SPAN * (len(asked) - before))

    def is_listed(self, epoch: int, dealing: Dealing, rank: int, length: int, digest: str, *, now: float) -> None:
        """Fact: a rank asks by a list of its own."""
        found = self._at(epoch, dealing, now)
        if rank in found.lists or self._has_room(found, _BYTES_OF_SPAN):
            found.lists[rank] = length, digest

    def received(
        self, epoch: int, dealing: Dealing, rank: int, spans: Iterable[tuple[int, int]], *, now: float
    ) -> None:
        """Fact: a rank has received these of its positions, ``[first, end)`` each."""
        spans = list(spans)
        check_places(epoch, dealing, rank, np.array(spans, dtype=np.int64).reshape(-1, 2))
        found = self._at(epoch, dealing, now)
        if rank not in found.received and not self._has_room(found, _BYTES_OF_RANK):
            return
        known = found.received.setdefault(rank, PositionSet())
        before = len(known)
        if before < _MOST_SPANS and self._has_room(found, _BYTES_OF_SPAN * len(spans)):
            known.add_spans(spans)
            self._count(found, _BYTES_OF_SPAN * (len(known) - before - len(spans)))

    def loops_had(self, epoch: int, dealing: Dealing, parts: Iterable[DigestPart], *, now: float) -> None:
        """Fact: loops have had these parts of an epoch."""
        parts = list(parts)
        for part in parts:
            check_part(epoch, dealing, part)
        found = self._at(epoch, dealing, now)
        of_dealt: dict[tuple[int, int, int, bool, int], list[DigestPart]] = {}
        for part in parts:
            of_dealt.setdefault(part.dealt, []).append(part)
        for dealt, said in of_dealt.items():
            before = found.digests.get(dealt, [])
            known = merged_parts([*said, *before], _MOST_PARTS)
            more_bytes = _bytes_of(known) - _bytes_of(before)
            if more_bytes <= 0 or self._has_room(found, more_bytes):
                self._count(found, min(0, more_bytes))
                found.digests[dealt] = known

    def goes_without(
        self, epoch: int, dealing: Dealing, rank: int, positions: Int64Array, samples: Int64Array, *, now: float
    ) -> None:
        """Fact: a rank goes on without damaged samples."""
        check_places(epoch, dealing, rank, np.stack([positions, positions + 1], axis=1))
        at = self._at(epoch, dealing, now)
        known = at.damaged.get(rank, {})
        num_more = sum(position not in known for position in positions.tolist())  # it may say again what it has said
        if not self._has_room(at, _BYTES_OF_SPAN * num_more):
            return
        found = at.damaged.setdefault(rank, {})
        self.num_damaged -= len(found)
        found.update(zip(positions.tolist(), samples.tolist(), strict=True))
        self.num_damaged += len(found)


def packed_spans(spans: PositionSet) -> str:
    """In a string, which is read many times as fast as lists of numbers are."""
    return b64encode(spans.to_array().astype("<i8", copy=False).tobytes()).decode()


def spans_in(said: str | list[tuple[int, int]]) -> Int64Array | list[tuple[int, int]]:
    """What :func:`packed_spans` wrote, or a pod that does not know it. Raises :class:`InvalidInput` for what is
    neither."""
    if not isinstance(said, str):
        return said
    try:
        return np.frombuffer(b64decode(said, validate=True), dtype="<i8").astype(np.int64).reshape(-1, 2)
    except ValueError as error:
        raise InvalidInput(f"another pod says spans of positions that are none: {said:.40}") from error


def check_places(epoch: int, dealing: Dealing, rank: int, spans: Int64Array) -> None:
    """Raises :class:`InvalidInput` unless all places of ``(n, 2)`` spans ``[first, end)`` are a rank's."""
    first, end, length = spans[:, 0], spans[:, 1], dealing.per_rank
    wrong = np.flatnonzero((first < 0) | (first > end) | (end > length))
    if len(wrong):
        of = "-".join(map(str, spans[wrong[0]].tolist()))
        raise InvalidInput(f"rank {rank} has {length} positions in epoch {epoch}, got {of}")


def check_part(epoch: int, dealing: Dealing, part: DigestPart) -> None:
    """Raises :class:`InvalidInput` for places that the rank of a part does not have."""
    length = part.dealing(dealing.num_positions).per_rank
    if part.spans and part.spans[-1][1] > length:
        raise InvalidInput(f"rank {part.rank} has {length} positions in epoch {epoch}, got {part.spans[-1]}")


def _bytes_of(digests: list[DigestPart]) -> int:
    return sum(_BYTES_OF_RANK + _BYTES_OF_SPAN * len(part.spans) for part in digests)


def receipt_of(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What is known of an epoch that pods have these parts of (:meth:`EpochReceived.to_dict`), at least one.

    Only of how it was dealt last: what other dealings had before lies in a checkpoint that this one goes on from.
    """
    parts = list(parts)
    newest = max(parts, key=lambda part: float(part["since"]))["dealing"]
    num_positions, num_ranks, batch, start, drop_last = newest
    dealing = Dealing(num_positions, num_ranks, batch, start, bool(drop_last))
    ranks: dict[int, PositionSet] = {}
    damaged: dict[int, dict[int, int]] = {}
    for part in parts:
        if part["dealing"] != newest:
            continue
        for rank, spans in part["received"].items():
            ranks.setdefault(int(rank), PositionSet()).add_spans(spans_in(spans))
        for rank, named in part["damaged"].items():
            damaged.setdefault(int(rank), {}).update((position, sample) for position, sample in named)
    of_ranks = {rank: ranks[rank].count for rank in sorted(ranks)}
    of_damaged = {
        "damaged": sum(map(len, damaged.values())),
        "damaged_samples": sorted({sample for named in damaged.values() for sample in named.values()})[:100],
    }
    if dealing == Dealing.of_lists(num_ranks):
        of_run = [part for part in parts if part["dealing"] == newest]
        return _receipt_of_lists(of_run, ranks, dealing) | {"ranks": of_ranks} | of_damaged
    dealt = dealing.per_rank * num_ranks
    planned = min(num_positions, start + dealt)
    repeats = (
        sum(_num_received(ranks.get(rank), dealing, rank) for rank in range(num_ranks))
        if start + dealt > num_positions
        else 0
    )
    received = start + sum(of_ranks.values()) - repeats
    return {
        "planned": planned,
        "received": received,
        "unconfirmed": planned - received,
        "dropped": num_positions - planned,
        "repeats": repeats,
        "exact": received == planned,
        "from_checkpoint": start,
        "ranks": of_ranks,
        "world_size": num_ranks,
    } | of_damaged


def _receipt_of_lists(parts: list[dict[str, Any]], ranks: dict[int, PositionSet], dealing: Dealing) -> dict[str, Any]:
    """It is exact when the lists of all ranks are known: pods that have lost them are told again."""
    lists: dict[int, tuple[int, str]] = {}
    for part in sorted(parts, key=lambda part: float(part["since"])):
        lists |= {int(rank): (int(length), str(digest)) for rank, (length, digest) in part["lists"].items()}
    lists = {rank: lists[rank] for rank in sorted(lists) if rank < dealing.num_ranks}
    planned = sum(length for length, _ in lists.values())
    received = sum(
        max(0, min(end, lists[rank][0]) - first)
        for rank, spans in ranks.items()
        if rank in lists
        for first, end in spans
    )
    all_known = len(lists) == dealing.num_ranks
    return {
        "planned": planned,
        "received": received,
        "unconfirmed": planned - received,
        "dropped": 0,
        "repeats": 0,
        "exact": all_known and received == planned,
        "from_checkpoint": 0,
        "world_size": dealing.num_ranks,
        "lists": len(lists),
        "asked": f"{key_of(*(part for rank, of_rank in lists.items() for part in (rank, *of_rank))):016x}",
    }


def _num_received(known: PositionSet | None, dealing: Dealing, rank: int) -> int:
    """Of the positions that repeat some, to fill the last step up."""
    if known is None:
        return 0
    last = np.arange(max(0, dealing.per_rank - dealing.batch), dealing.per_rank, dtype=np.int64)
    past = last[dealing.positions(rank, last) >= dealing.num_positions].tolist()
    return sum(known.has_any(position, position + 1) for position in past)
