"""What does a rank of a mixture ask of pods? Samples of several planned jobs, one for each dataset.

Which dataset and which sample of it each position has is arithmetic (``protocol/mixture_order.py``), so pods know of
jobs alone, and each of them is exact by its own plan. An epoch of such a job is a *pass* over its dataset. All ranks of
the mixture ask for its positions, each for some of them, as members of one group. What a batch has of all datasets at a
pod is one request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np

from refill.errors import EpochNotReady, InvalidInput, JobConflict, PodBusy, PodUnreachable, RefillError, UnknownJob
from refill.pods.batch_groups import BatchGroups
from refill.pods.credentials import Credentials
from refill.pods.holder_door import is_wanted
from refill.pods.home_watch import watch_home
from refill.pods.member_connection import MemberConnection, OfDataset
from refill.pods.own_process import PerProcess
from refill.pods.planned_connection import AskedBatch, PlannedConnection
from refill.pods.planned_place import DealtConnection, RankPlace
from refill.pods.pod_channel import PodChannel
from refill.pods.received_batch import ReceivedBatch, joined
from refill.pods.resume_state import ResumeState
from refill.protocol.column_values import ColumnValues
from refill.protocol.dealing import Dealing
from refill.protocol.job_spec import JobSpec
from refill.protocol.keyed_hash import key_of
from refill.protocol.mixture_order import MIXTURE_VERSION, MemberPlace, MixtureEpoch
from refill.protocol.mixture_weights import MixtureWeights, memory_parts
from refill.protocol.receipt_digest import DigestPart
from refill.protocol.sample_cut import SampleCut
from refill.protocol.wire_format import MAX_BATCH, MAX_TOGETHER, Int64Array

Found = TypeVar("Found")

_MOST_AT_ONCE = 8
"""Jobs that are registered, or looked at, at the same time."""
_KEPT_EPOCHS = 2


class Mixed(NamedTuple):
    """What a mixture is made of."""

    datasets: dict[str, str]
    """URLs, by name."""
    weights: MixtureWeights
    block: int


class _Piece(NamedTuple):
    """What a batch has of one pass of a dataset."""

    member: int
    places: Int64Array
    """``(n,)`` in the batch."""
    asked: AskedBatch
    of_pods: list[tuple[str, Int64Array]]
    left: Int64Array


class MixtureConnection(PerProcess, DealtConnection):
    """A rank's connection to the pods of a mixture. Parameters and errors as those of :class:`PlannedConnection`, whose
    place it takes. Samples are numbered through all datasets, one after another.

    :param spec: settings that the jobs of all datasets have; ``memory_bytes`` is divided among them.
    :param member_places: of each dataset, shared by all copies.
    :param base: ``(1 + 2 * datasets,)`` zeros that all copies share: an epoch, and where the datasets stand before it.
    """

    OF_ONE_PROCESS = ("_epochs", "_epochs_from", "_dealt", "_is_watched", "_of_ranks")
    look_every_seconds = PlannedConnection.look_every_seconds

    def __init__(
        self,
        service_url: str,
        spec: JobSpec,
        rank: int,
        home: str | None,
        timeout_seconds: float,
        credentials: Credentials | None,
        connect_timeout_seconds: float,
        mixed: Mixed,
        *,
        goes_without_damaged: bool,
        place: RankPlace,
        member_places: Sequence[RankPlace],
        base: Any,
        groups: BatchGroups,
        cut: SampleCut,
    ) -> None:
        if not spec.is_planned or spec.is_listed:
            raise InvalidInput("a Mixture has policy='planned' and an order of its own: leave out policy and order")
        super().__init__(spec, rank, place, groups)
        self.names = list(mixed.datasets)
        self.mixed = mixed
        credentials = credentials or Credentials()
        held_for = spec.name if is_wanted(spec.world_size) else None
        self.channel = PodChannel(credentials, connect_timeout_seconds, held_for=held_for)
        self.probes = PodChannel(credentials, connect_timeout_seconds, held_for=held_for, is_quick=True)
        self.members = [
            MemberConnection(
                self,
                service_url,
                self._spec_of(name),
                rank,
                home,
                timeout_seconds,
                credentials,
                True,
                connect_timeout_seconds,
                goes_without_damaged=goes_without_damaged,
                place=member_place,
                cut=cut,
            )
            for name, member_place in zip(self.names, member_places, strict=True)
        ]
        self._of_datasets: list[OfDataset] | None = None
        self._is_registered = False
        self._shared_base = base
        self._memory: dict[str, int] = {}
        """Of the jobs of datasets, as a state says."""
        self._left_out: list[list[MemberPlace]] = [[] for _ in self.names]
        """Of each dataset, what drop_last has left out of its pass in the epochs before that."""
        self._begin_process()

    def _begin_process(self) -> None:
        super()._begin_process()
        self._epochs: dict[int, tuple[MixtureEpoch, list[MemberPlace]]] = {}
        """Those of the last epochs that were asked for, and where the datasets stand at their beginnings."""
        self._epochs_from: list[int] = []
        """The base that these follow from."""
        self._dealt = 0, 0
        """For how many positions in a batch, and the number."""
        self._is_watched = False
        self._of_ranks: dict[int, MixtureConnection] = {}

    def _spec_of(self, name: str) -> JobSpec:
        """Each dataset has a seed of its own: equal ones would come in equal orders."""
        spec = self.spec
        seed = key_of("refill mixture dataset", spec.seed, name) >> 1
        read_seed = None if spec.read_seed is None else key_of("refill mixture dataset", spec.read_seed, name) >> 1
        spec = replace(spec, seed=seed, read_seed=read_seed)
        return replace(spec, name=f"{spec.name}.{name}", dataset=self.mixed.datasets[name], num_epochs=0)

    # The datasets, and their jobs.

    @property
    def home(self) -> str:  # type: ignore[override]  # which nobody sets
        return self.members[0].home

    @property
    def of_datasets(self) -> list[OfDataset]:
        """What pods say of the datasets, before any job is registered."""
        if self._of_datasets is None:
            self._of_datasets = self._each(MemberConnection.look_at)
        return self._of_datasets

    def _each(self, work: Callable[[MemberConnection], Found]) -> list[Found]:
        """Of all members, in their order. Whoever interrupts it (^C) need not wait for pods that do not answer, as with
        a pool of threads, which is waited for."""
        left = deque(enumerate(self.members))
        answers: SimpleQueue[tuple[int, Future[Found]]] = SimpleQueue()

        def run() -> None:
            while left:
                with contextlib.suppress(IndexError):  # another thread had the last one
                    place, member = left.popleft()
                    answers.put((place, _outcome(work, member)))

        threads = [
            threading.Thread(target=run, name="refill-mixture", daemon=True)
            for _ in range(min(_MOST_AT_ONCE, len(self.members)))
        ]
        try:
            for thread in threads:
                thread.start()
            found = dict(answers.get() for _ in self.members)
        finally:
            left.clear()
        for thread in threads:  # loader workers are forked without them
            thread.join()
        return [found[place].result() for place in range(len(found))]

    @property
    def sizes(self) -> list[int]:
        return [found.num_samples for found in self.of_datasets]

    @property
    def first_ids(self) -> Int64Array:
        """``(datasets + 1,)`` the number of the first sample of each dataset, and that of all samples."""
        return np.cumsum([0, *self.sizes])

    def num_samples(self) -> int:
        return sum(self.sizes)

    def info(self) -> dict[str, Any]:
        if not self._is_registered:
            self._divide_memory()
            try:
                self._each(MemberConnection.info)
            except JobConflict as error:
                raise _said_of_ranks(error) from None
            self._is_registered = True
        first = self.members[0].info()
        return {
            "num_samples": self.num_samples(),
            "samples_per_rank": self.dealing(-1).per_rank,
            "plan_id": self._plan_id(),
            "incarnation": self._plan_id(),
            "metadata": {},
            "pods": first["pods"],
        }

    def _divide_memory(self) -> None:
        """Of what the mixture has on each pod each job has a part, which it keeps."""
        found = self.of_datasets
        total = self.spec.memory_bytes or min(each.job_memory_bytes for each in found)
        counts = self.mixed.weights.counts(self._base[0], self.sizes, self.spec.seed)
        sample_bytes = [each.sample_bytes for each in found]
        # What was named is divided alike by all ranks, also where pods have become more since.
        most_bytes = [] if self.spec.memory_bytes else [each.most_memory_bytes for each in found]
        parts = memory_parts(total, counts, sample_bytes, self.spec.chunk_size, most_bytes)
        for member, name, part in zip(self.members, self.names, parts, strict=True):
            if not member.is_registered:
                member.spec = replace(member.spec, memory_bytes=self._memory.get(name, part))

    # The order.

    @property
    def _base(self) -> tuple[int, list[MemberPlace]]:
        """An epoch, and where the datasets stand before it. Workers that live on must see that of a state which is
        loaded later."""
        epoch, *places = self._shared_base.tolist()
        return epoch, list(map(MemberPlace, places[::2], places[1::2]))

    def _begins_from(self, epoch: int, places: Sequence[MemberPlace]) -> None:
        for at, number in enumerate([epoch, *(number for place in places for number in place)]):
            self._shared_base[at] = number

    def counts(self, epoch: int) -> list[int]:
        """Samples that an epoch has of each dataset."""
        return self.mixed.weights.counts(self._base[0] if epoch < 0 else epoch, self.sizes, self.spec.seed)

    def num_positions(self, epoch: int) -> int:
        return sum(self.counts(epoch))

    def order(self, epoch: int) -> tuple[MixtureEpoch, list[MemberPlace]]:
        """Of an epoch; and where each dataset stands when it begins. Raises :class:`InvalidInput` for an epoch that was
        over when the state was saved."""
        if self._epochs_from != (base := self._shared_base.tolist()):
            self._epochs.clear()
            self._epochs_from = base
        if epoch not in self._epochs:
            at, places = self._base
            if epoch < at:
                raise InvalidInput(f"the mixture goes on from epoch {at}, and epoch {epoch} was over before")
            if known := [each for each in self._epochs if each < epoch]:
                at, places = max(known), self._epochs[max(known)][1]
            while True:
                counts = self.counts(at)
                places = _beginning(places, self.sizes, counts)
                if at == epoch:
                    break
                places, at = _after(places, self.sizes, counts), at + 1
            for old in sorted(self._epochs)[: 1 - _KEPT_EPOCHS]:
                self._epochs.pop(old, None)
            self._epochs[epoch] = MixtureEpoch(counts, self.mixed.block, self.spec.seed, epoch), places
        return self._epochs[epoch]

    def passes(self, epoch: int) -> list[list[int]]:
        """Of each dataset, the passes that an epoch has samples of: epochs of its job."""
        found = []
        for place, size, count in zip(self.order(epoch)[1], self.sizes, self.counts(epoch), strict=True):
            last = place.after(size, max(0, count - 1)).number
            found.append(list(range(place.number, last + 1)) if count else [])
        return found

    # States.

    @property
    def plan(self) -> dict[str, Any]:
        self.info()
        return self._about() | {
            "plans": {name: member.plan for name, member in zip(self.names, self.members, strict=True)},
            "memory_bytes": {
                name: member.spec.memory_bytes for name, member in zip(self.names, self.members, strict=True)
            },
            "left_out": {
                name: [list(place) for place in places]
                for name, places in zip(self.names, self._left_out, strict=True)
                if places
            },
            "drops": [self._place.start(self._base[0]), self.spec.num_groups] if self.spec.drop_last else None,
        }

    def _about(self) -> dict[str, Any]:
        epoch, places = self._base
        return {
            "mixture": MIXTURE_VERSION,
            "block": self.mixed.block,
            "seed": self.spec.seed,
            "sizes": self.sizes,
            "weights": self.mixed.weights.to_dict(),
            "from": [epoch, [list(place) for place in places]],
        }

    def _plan_id(self) -> str:
        about = self._about() | {"ids": [member.plan_id for member in self.members]}
        return hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16).hexdigest()

    def keeps_plan_of(self, state: ResumeState) -> bool:
        """At the end of an epoch weights and datasets may be others from the next one on: those that were there go on
        where they stand."""
        saved = _SavedMixture.of(state)
        epoch = state.epoch + 1 if state.at_end else state.epoch
        if not state.at_end and saved.order_of(epoch) != self._order_of(epoch):
            raise InvalidInput(
                f"the state is of {saved.said(epoch)} in epoch {epoch}, and this mixture has {self._said(epoch)}: "
                "within an epoch it stays as it was; others begin with a later epoch, "
                f"weights={{0: ..., {epoch + 1}: ...}}"
            )
        places, left_out = saved.places_before(epoch)
        self._begins_from(epoch, [places.get(name, MemberPlace()) for name in self.names])
        self._left_out = [left_out.get(name, []) for name in self.names]
        named, before = self.spec.memory_bytes, sum(saved.memory_bytes.values())
        is_as_before = not named or abs(named - before) <= len(saved.memory_bytes)  # its parts were rounded
        self._memory = saved.memory_bytes if is_as_before else {}
        self._divide_memory()
        for name, member in zip(self.names, self.members, strict=True):
            if name in saved.plans:
                member.goes_by(saved.plans[name])
        self.info()
        return True

    def _order_of(self, epoch: int) -> Any:
        return self.names, self.sizes, self.counts(epoch), self.mixed.block, self.spec.seed

    def _said(self, epoch: int) -> str:
        return _said(self.names, self.counts(epoch), self.mixed.block)

    def deals(self, epoch: int, start: int, had: int, batch: int = 0) -> None:
        """A pass is dealt from its beginning, so that a rank that goes on alone deals it as those do that live: all
        that comes before was had, but for what was left out."""
        super().deals(epoch, start, had, batch)
        steps = had // max(1, batch) * batch * self.spec.num_groups
        for member, left, at in zip(self.members, self._left_out, self._places_at(epoch, start + steps), strict=True):
            member.deals_pass(at, np.array([each.position for each in left if each.number == at.number], np.int64))

    def _places_at(self, epoch: int, position: int) -> list[MemberPlace]:
        """Where each dataset stands at a position of an epoch; of one that the state has left, at the next one's
        beginning."""
        first = self._base[0]
        order, places = self.order(max(epoch, first))
        before = order.num_before(min(position, order.num_positions)) if epoch >= first else [0] * len(places)
        return [place.after(size, count) for place, size, count in zip(places, self.sizes, before, strict=True)]

    @property
    def dealt(self) -> int:
        """A number that follows from how the mixture is woven and dealt: pods refuse ranks with another one."""
        batch = self._place.batch(-1)
        if self._dealt[0] != batch:
            about = [self.mixed.block, self.spec.seed, self.spec.num_groups, batch, self.spec.drop_last]
            said = json.dumps([about, self.mixed.weights.to_dict()])
            self._dealt = batch, 1 + key_of("refill mixture dealt", said) % MAX_BATCH
        return self._dealt[1]

    # Samples.

    def batch(self, epoch: int, positions: Int64Array, sample_ids: Int64Array | None = None) -> ReceivedBatch:
        self._own_process()
        self.info()
        self._check_positions(epoch, positions)
        self._place.asks_in_batches(1)  # unless a loader has said more: from now on it must not change
        dealing = self.dealing(epoch)
        return self.at(epoch, dealing.positions(self.group, positions) % max(1, dealing.num_positions))

    def at(self, epoch: int, wanted: Int64Array) -> ReceivedBatch:
        """The samples at positions ``(n,)`` of an epoch's one order, all different."""
        self._own_process()
        self.info()
        self._place.asks_in_batches(1)
        pieces = list(self._pieces(epoch, wanted))
        answers = self._asked_together(pieces)
        first_ids = self.first_ids
        parts: list[tuple[Int64Array, ReceivedBatch]] = []
        for piece, answered in zip(pieces, answers, strict=True):
            member = self.members[piece.member]
            came, failed = member.sorted_out(*answered)
            left = np.sort(np.concatenate([piece.left, *failed]))
            try:
                found = member.has_batch(piece.asked, came, left)
            except (EpochNotReady, JobConflict) as error:
                raise _said_of_ranks(error) from None
            ids = found.sample_ids + first_ids[piece.member]
            parts.append((piece.places, ReceivedBatch(ids, found.payloads, found.damaged)))
        return joined(len(wanted), parts)

    def _pieces(self, epoch: int, wanted: Int64Array) -> Iterator[_Piece]:
        """:param wanted: ``(n,)`` positions of the epoch's one order."""
        order, places = self.order(epoch)
        members, nth = order.samples_at(wanted)
        for number in np.unique(members).tolist():
            at = np.flatnonzero(members == number)
            passes, within = np.divmod(places[number].position + nth[at], max(1, self.sizes[number]))
            for each in np.unique(passes).tolist():
                here = passes == each
                member = self.members[number]
                asked = member.begins_at(places[number].number + each, within[here])
                of_pods, left = member.pods_of(asked)
                yield _Piece(number, at[here], asked, of_pods, left)

    def _asked_together(
        self, pieces: list[_Piece]
    ) -> list[tuple[list[tuple[str, Int64Array]], list[ReceivedBatch | RefillError]]]:
        """Of each piece, whom it was asked for, and their answers: one request to each pod. What pods do not answer in
        that way is left to a request of its own, which says why."""
        of_pods: dict[str, list[tuple[int, Int64Array]]] = {}
        for number, piece in enumerate(pieces):
            for pod, places in piece.of_pods:
                of_pods.setdefault(pod, []).append((number, places))
        every = [
            (first, pod, asked[first : first + MAX_TOGETHER])
            for pod, asked in of_pods.items()
            for first in range(0, len(asked), MAX_TOGETHER)
        ]
        requests = [
            [
                self.members[pieces[number].member].asked_of(pod, pieces[number].asked, places)
                for number, places in asked
            ]
            for _, pod, asked in every
        ]
        found: list[tuple[list[tuple[str, Int64Array]], list[ReceivedBatch | RefillError]]]
        found = [([], []) for _ in pieces]
        for turn in sorted({first for first, _, _ in every}):  # a pod has one request at a time
            now = [number for number, (first, _, _) in enumerate(every) if first == turn]
            answers = self.members[0].fetch_together([requests[number] for number in now])
            for number, answer in zip(now, answers, strict=True):
                _, pod, asked = every[number]
                for place, (which, places) in enumerate(asked):
                    of_pod, of_piece = found[which]
                    of_pod.append((pod, places))
                    of_piece.append(_as_unanswered(answer) if isinstance(answer, RefillError) else answer[place])
        return found

    def in_order(self, epoch: int, of_samples: Sequence[Int64Array]) -> Int64Array:
        """``(positions,)`` a number of the sample at each position of an epoch's one order.

        :param of_samples: of each dataset, ``(samples,)`` by id.
        """
        self.info()
        order, places = self.order(epoch)
        members, nth = order.samples_at(np.arange(order.num_positions, dtype=np.int64))
        found = np.empty(order.num_positions, dtype=np.int64)
        for number, passes in enumerate(self.passes(epoch)):
            at = np.flatnonzero(members == number)
            each, within = np.divmod(places[number].position + nth[at], max(1, self.sizes[number]))
            for turn, one in enumerate(passes):
                here = each == turn
                ids = self.members[number].plan_order(one, self.sizes[number])
                found[at[here]] = of_samples[number][ids[within[here]]]
        return found

    def goes_on_with(self, epoch: int, first: int, had: Int64Array) -> None:
        """Fact: the loop goes on in an epoch of which all positions below ``first``, and these, were had."""
        self.deals(epoch, first, 0)
        for piece in self._pieces(epoch, had):
            self.members[piece.member].had_some(piece.asked)

    def samples(self, sample_ids: Int64Array) -> ReceivedBatch:
        self.info()
        parts = []
        for number, at, ids in self._by_dataset(sample_ids):
            found = self.members[number].samples(ids)
            parts.append((at, ReceivedBatch(sample_ids[at], found.payloads, found.damaged)))
        return joined(len(sample_ids), parts)

    def _by_dataset(self, sample_ids: Int64Array) -> Iterator[tuple[int, Int64Array, Int64Array]]:
        """Of samples by their numbers ``(n,)``: each dataset that has some, where they stand, and their ids there."""
        first_ids = self.first_ids
        members = np.searchsorted(first_ids[1:], sample_ids, side="right")
        for number in np.unique(members).tolist():
            at = np.flatnonzero(members == number)
            yield number, at, sample_ids[at] - first_ids[number]

    def index(self) -> None:
        """Each of its datasets has one."""

    def column(self, name: str, num_samples: int) -> Iterator[ColumnValues]:
        raise InvalidInput("a mixture has no columns of its own: each of its datasets has")

    def lengths(self, num_samples: int) -> Int64Array:
        self.info()
        every = zip(self.members, self.sizes, strict=True)
        return np.concatenate([member.lengths(size) for member, size in every])

    def of_rank(self, rank: int) -> MixtureConnection:
        self._own_process()
        self.info()
        if rank not in self._of_ranks:
            other = copy(self)
            other.rank = rank
            other.members = [member.of_rank(rank) for member in self.members]
            self._of_ranks[rank] = other
        return self._of_ranks[rank]

    # Facts for receipts and for those who watch.

    def loop_has(self, epoch: int, first: int, end: int) -> None:
        pass  # receipts are of passes, and say what was received

    def had_before(
        self, epoch: int, parts: Sequence[DigestPart], last: int, parts_of_last: Sequence[DigestPart]
    ) -> None:
        pass

    def digest_parts(self, epoch: int) -> list[DigestPart]:
        return []

    def goes_without(self, epoch: int, positions: Int64Array, sample_ids: Int64Array, why: list[RefillError]) -> None:
        dealing = self.dealing(epoch)
        wanted = dealing.positions(self.group, positions) % dealing.num_positions
        self.goes_without_at(epoch, wanted, sample_ids, why)

    def goes_without_at(self, epoch: int, wanted: Int64Array, sample_ids: Int64Array, why: list[RefillError]) -> None:
        """As :meth:`goes_without`, of positions of the epoch's one order."""
        first_ids = self.first_ids
        for piece in self._pieces(epoch, wanted):
            ids = sample_ids[piece.places] - first_ids[piece.member]
            reasons = [why[place] for place in piece.places.tolist()]
            self.members[piece.member].goes_without_some(piece.asked, ids, reasons)

    def skipped(self, epoch: int, start: int, end: int) -> bool:
        dealing = self.dealing(epoch)
        places = np.arange(start, min(end, dealing.per_rank), dtype=np.int64)
        wanted = dealing.positions(self.group, places[:MAX_BATCH]) % max(1, dealing.num_positions)
        return any(self.members[piece.member].has_left_out(piece.asked) for piece in self._pieces(epoch, wanted))

    def report(self, data_wait_seconds: float, samples: int, num_bytes: int) -> None:
        """The first dataset's job has it for all."""
        self.members[0].report(data_wait_seconds, samples, num_bytes)

    def epoch_counts(self, epoch: int) -> dict[str, Any]:
        """Of each dataset those of the passes that the epoch has samples of, and the sum of all."""
        found = {
            name: [member.epoch_counts(each) for each in passes]
            for name, member, passes in zip(self.names, self.members, self.passes(epoch), strict=True)
        }
        total: dict[str, int] = {}
        for counts in (each["total"] for of_passes in found.values() for each in of_passes):
            for name, number in counts.items():
                if isinstance(number, int):
                    total[name] = total.get(name, 0) + number
        return {"total": total, "datasets": found}

    def end_job(self) -> None:
        self._each(MemberConnection.end_job)

    def watch(self) -> None:
        """Fact: something is to be reported. One thread sees to that for all datasets."""
        if not self._is_watched:
            self._is_watched = True
            look_is_due = watch_home(self)
            for member in self.members:
                member.is_watched(look_is_due)

    def look_after_home(self) -> None:
        for member in self.members:
            with contextlib.suppress(RefillError):
                member.look_after_home()


class _SavedMixture(NamedTuple):
    """What a state says of the mixture that it was saved with."""

    weights: MixtureWeights
    sizes: list[int]
    block: int
    seed: int
    base: tuple[int, list[MemberPlace]]
    plans: dict[str, dict[str, Any]]
    memory_bytes: dict[str, int]
    left_out: dict[str, list[MemberPlace]]
    drops: tuple[int, int] | None
    """How ``base``'s epoch was dealt, where ranks drop the last positions of epochs: from where on, to how many."""

    @classmethod
    def of(cls, state: ResumeState) -> _SavedMixture:
        """Raises :class:`InvalidInput` for a state of another kind of job."""
        said = state.plan or {}
        if "mixture" not in said:
            raise InvalidInput(
                f"the state is of job {state.job}, which was no mixture: its epochs begin anew, without it"
            )
        if said["mixture"] != MIXTURE_VERSION:
            raise InvalidInput(
                f"the state is of a mixture of version {said['mixture']!r:.20}, and this refill has {MIXTURE_VERSION}"
            )
        weights = MixtureWeights.from_dict(said.get("weights"))
        try:
            epoch, places = said["from"]
            found = cls(
                weights,
                [int(size) for size in said["sizes"]],
                int(said["block"]),
                int(said["seed"]),
                (int(epoch), [MemberPlace(int(number), int(position)) for number, position in places]),
                {str(name): dict(plan) for name, plan in said["plans"].items()},
                {str(name): int(number) for name, number in said["memory_bytes"].items()},
                {
                    str(name): [MemberPlace(int(number), int(position)) for number, position in places]
                    for name, places in said["left_out"].items()
                },
                (int(drops[0]), int(drops[1])) if (drops := said["drops"]) else None,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"the state of the mixture is damaged: {error!r:.100}") from error
        fits = len(weights.names) == len(found.sizes) == len(found.base[1]) and found.base[0] <= state.epoch
        fits &= all(0 <= number < 2**62 for place in found.base[1] for number in place)
        if not fits or (found.drops and (found.drops[0] < 0 or found.drops[1] < 1)):
            raise InvalidInput("the state of the mixture is damaged: its parts do not fit together")
        return found

    def counts(self, epoch: int) -> list[int]:
        return self.weights.counts(epoch, self.sizes, self.seed)

    def order_of(self, epoch: int) -> Any:
        return list(self.weights.names), self.sizes, self.counts(epoch), self.block, self.seed

    def said(self, epoch: int) -> str:
        return _said(self.weights.names, self.counts(epoch), self.block)

    def places_before(self, epoch: int) -> tuple[dict[str, MemberPlace], dict[str, list[MemberPlace]]]:
        """Where the datasets stand at the end of the epoch before, and what was left out of the passes that they are
        in."""
        at, places = self.base
        names = self.weights.names
        left_out = [list(self.left_out.get(name, ())) for name in names]
        for each in range(at, epoch):
            counts = self.counts(each)
            begun = _beginning(places, self.sizes, counts)
            places = _after(begun, self.sizes, counts)
            for member, nth in self._dropped(each, counts):
                left_out[member].append(begun[member].after(self.sizes[member], nth))
            left_out = [
                [each for each in left if each.number == place.number]
                for left, place in zip(left_out, places, strict=True)
            ]
        return dict(zip(names, places, strict=True)), dict(zip(names, left_out, strict=True))

    def _dropped(self, epoch: int, counts: list[int]) -> Iterator[tuple[int, int]]:
        """Of the last positions of an epoch, which no rank was dealt: the dataset, and which of its samples."""
        if self.drops is None:
            return
        start, num_ranks = self.drops[0] if epoch == self.base[0] else 0, self.drops[1]
        dealing = Dealing(sum(counts), num_ranks, 1, start, drop_last=True)
        dropped = np.arange(start + dealing.per_rank * num_ranks, dealing.num_positions)
        order = MixtureEpoch(counts, self.block, self.seed, epoch)
        yield from zip(*(each.tolist() for each in order.samples_at(dropped)), strict=True)


def _beginning(places: Sequence[MemberPlace], sizes: Sequence[int], counts: Sequence[int]) -> list[MemberPlace]:
    return [place.begins(size, count) for place, size, count in zip(places, sizes, counts, strict=True)]


def _after(places: Sequence[MemberPlace], sizes: Sequence[int], counts: Sequence[int]) -> list[MemberPlace]:
    return [place.after(size, count) for place, size, count in zip(places, sizes, counts, strict=True)]


def _said(names: Sequence[str], counts: Sequence[int], block: int) -> str:
    some = [f"{count} of {name}" for name, count in zip(names, counts, strict=True)]
    return f"{', '.join(some[:8])}{', ...' * (len(some) > 8)} in blocks of {block}"


def _outcome(work: Callable[[MemberConnection], Found], member: MemberConnection) -> Future[Found]:
    outcome: Future[Found] = Future()
    try:
        outcome.set_result(work(member))
    except BaseException as error:  # whoever asks for the result gets it
        outcome.set_exception(error)
    return outcome


def _as_unanswered(error: RefillError) -> RefillError:
    """Of several requests that came together: each is made alone, and then says what is wrong with it."""
    if error.status == PodUnreachable.status or isinstance(error, UnknownJob):
        return error
    return PodBusy(error.message)


def _said_of_ranks(error: RefillError) -> RefillError:
    """The error, with what else may be wrong where ranks of a mixture differ."""
    said = type(error)(
        f"{error.message}. All ranks of a Mixture have the same datasets, weights and seed, and where "
        "these change with an epoch's end all have Mixture(..., resume=state)"
    )
    said.details = error.details
    return said
