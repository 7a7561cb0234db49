"""How does a batch reach the training loop? The data path of the client, from top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import logging
import operator
import os
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed
import torch.utils.data

from refill.batch_groups import BatchGroups, batch_groups
from refill.credentials import Credentials
from refill.decoders import Decode
from refill.delivery_record import DeliveryRecord
from refill.epoch_place import checked_epoch
from refill.epoch_sampler import Position
from refill.errors import InvalidInput, RefillError, SampleDamaged, SamplesSkipped
from refill.fetched_counts import FetchedCounts
from refill.hole_guard import Hole, HoleGuard
from refill.loader_batch import check_one_shape
from refill.planned_connection import PlannedConnection, RankPlace
from refill.planned_place import goes_on_from, state_at
from refill.pod_connection import PodConnection, ReceivedBatch
from refill.protocol.incarnation import line_of
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import Int64Array
from refill.resume_checks import check_is_of, check_is_remembered, place_dealt_anew
from refill.resume_state import ResumeState
from refill.run_start import RunStart
from refill.sample_decoder import SampleDecoder, Transform, why_not_alike

__all__ = ["CacheDataset"]

log = logging.getLogger(__name__)

_STAND_INS = 16
"""So many samples, from all over the dataset, are tried in place of a first batch that is all damaged."""
_ASK_AGAIN_AFTER_SECONDS = (0.1, 0.3, 0.6)
"""Before samples are called skipped, pods are asked so often, with these pauses."""


_records: weakref.WeakValueDictionary[tuple[str, int], DeliveryRecord] = weakref.WeakValueDictionary()
"""By run of a job and rank, what this process has received."""


class CacheDataset(torch.utils.data.Dataset[Any]):
    """A PyTorch dataset (map-style) whose samples come from the pods, one request for each batch.

    Use it in any DataLoader with :class:`EpochSampler`, or with :class:`TraceSampler` around a sampler of your own.
    Workers may be forked or spawned, persistent or not. A sample is ``{"__key__": str, "__id__": int, extension:
    value}``. A plain integer works as an index, too, and gives exactly the sample with that id. It is read from the
    store alone: good for a look, slow for training.

    :param service_url: URL of the service or of any pod, ``http://refill:8000``.
    :param dataset: URL of the dataset as the pods reach it, ``s3://bucket/prefix``.
    :param job: name of the training run. All its ranks give the same name; another run takes another one.
    :param rank, world_size: the number of this training process, and how many there are. None: those of
        torch.distributed, else of the variables RANK and WORLD_SIZE, else 0 of 1.
    :param seed, shuffle, drop_last: as in DistributedSampler. None: what the sampler is given, else 0, True, False.
    :param decode: None leaves the members of a sample as bytes. True decodes them by extension. A mapping of
        extensions to functions, or one function, decodes them your way: docs/CLIENT.md, "Samples".
    :param transform: called with each sample; what it returns takes the sample's place.
    :param home: URL of the pod that this rank asks. None: the rank's number picks one.
    :param token_file: file with the token that the pods ask for. None: the file that REFILL_TOKEN_FILE names, else the
        token that REFILL_TOKEN holds.
    :param ca_file: file with the certificates to trust for an https service, PEM. None: REFILL_CA_FILE, else the
        system's.
    :param timeout_seconds: how long the client asks again while pods do not answer, or are not ready. Then it fails.
    :param connect_timeout_seconds: how long looking up a pod's name may take, and then reaching its machine. After that
        its address is looked up again.
    :param resume: the state of a checkpoint, when the number of ranks or pods has changed since it was saved. What is
        left of the epoch is dealt to the ranks that there are now. All ranks give a state of the same step; it may be
        any rank's. The loader or the sampler loads the state, too. Right with the same ranks and pods as well.
    :param allow_skipped: True: a sampler may leave out positions, and their samples are lost. Otherwise that is an
        error (:class:`refill.errors.SamplesSkipped`): it happens when a trainer divides a sampler a second time.
    :param on_damaged: ``"raise"``: a sample whose bytes are damaged, or that can't be decoded, is an error
        (:class:`refill.errors.SampleDamaged`). ``"skip"``: the run goes on without it. Its batch is one sample shorter,
        and the receipt names it.
    :param batch_group: how many ranks in a row share each batch, as in tensor, context or pipeline parallel training;
        or the dimension of a ``torch.distributed`` DeviceMesh whose ranks do, ``mesh["tp"]``. All of a group get the
        same batches, which are read once. Goes with ``policy="planned"``.
    :param settings: further settings of the job, such as ``chunk_size``: docs/CLIENT.md, "Settings of a job".

    The job is registered with the pods at the first use: when a sampler is made, or a length or a sample is asked for.
    Then its settings are fixed. Most samplers of torch ask for the length: around those, give ``order="explicit"``
    here. Errors are of :mod:`refill.errors`.
    """

    def __init__(
        self,
        service_url: str,
        *,
        dataset: str,
        job: str,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int | None = None,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        decode: Decode = None,
        transform: Transform | None = None,
        home: str | None = None,
        token_file: str | None = None,
        ca_file: str | None = None,
        timeout_seconds: float = 300.0,
        connect_timeout_seconds: float = 2.0,
        resume: Any = None,
        allow_skipped: bool = False,
        on_damaged: str = "raise",
        batch_group: Any = None,
        **settings: Any,
    ) -> None:
        if "name" in settings:
            raise InvalidInput(f"CacheDataset has no setting 'name': job={job!r} is the job's name")
        if "holder" in settings:
            raise InvalidInput("CacheDataset has no setting 'holder': pods take it from the token")
        _check_spelling(settings)
        if on_damaged not in ("raise", "skip"):
            raise InvalidInput(f"on_damaged must be 'raise' or 'skip', got {on_damaged!r}")
        self._groups = BatchGroups() if batch_group is None else batch_groups(batch_group)
        if self._groups.size > 1:
            settings = settings | {"batch_group": self._groups.size}
        said = {"world_size": world_size, "seed": seed, "shuffle": shuffle, "drop_last": drop_last, **settings}
        self._settings = {"name": job, "dataset": dataset} | {
            n: value for n, value in said.items() if value is not None
        }
        self._rank = rank
        self._service_url = service_url
        self._home = home
        self._credentials = Credentials(token_file, ca_file)
        self._timeout_seconds = timeout_seconds
        self._connect_timeout_seconds = connect_timeout_seconds
        self._decoded = SampleDecoder(decode, transform)
        self._resume = None if resume is None else ResumeState.from_dict(resume)
        self._record = DeliveryRecord()
        self.allow_skipped = allow_skipped
        self._skips_damaged = on_damaged == "skip"
        self._spare: Any = None
        """A sample that came, for a batch of which nothing else is left."""
        self._guard = HoleGuard()
        self._is_rank = False
        self._connection: PodConnection | PlannedConnection | None = None
        self._num_samples: int | None = None
        self._labels: Int64Array | None = None
        self._lengths: Int64Array | None = None
        self._warned = False
        self._warned_of_members = False
        self._samplers: list[weakref.ref[torch.utils.data.DistributedSampler[Any]]] = []
        self._fetched = FetchedCounts()
        self._start = RunStart(torch.zeros(RunStart.NUM_SHARED, dtype=torch.int64).share_memory_())  # type: ignore[no-untyped-call]
        self._place = RankPlace(torch.zeros(RankPlace.NUM_SHARED, dtype=torch.int64).share_memory_())  # type: ignore[no-untyped-call]
        self._new_connection()  # a wrong URL or setting fails here, not at the first batch

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_samplers": [], "_spare": None, "_labels": None, "_lengths": None}

    def __len__(self) -> int:
        """Number of samples of the whole dataset."""
        if self._num_samples is None:
            self._num_samples = int(self.connection.info()["num_samples"])
        return self._num_samples

    def __getitems__(self, indices: Sequence[Position | int]) -> list[Any]:
        """One batch, by one request: what DataLoader calls.

        :param indices: positions of one epoch, as :class:`EpochSampler` and :class:`TraceSampler` yield them.

        Raises :class:`InvalidInput` when the samples are of several shapes, and the DataLoader has no ``collate_fn``
        of yours that takes them.
        """
        if not len(indices):
            return []
        if isinstance(indices[0], Position):
            samples = self._positions(indices)
        else:
            self._warn_once(
                "a batch of plain integers reads each sample on its own from the store: give the DataLoader "
                "sampler=refill.EpochSampler(dataset), or refill.TraceSampler(dataset, your_sampler)"
            )
            samples = self._exactly(indices)
        check_one_shape(samples)
        return samples

    def __getitem__(self, index: Position | int | Sequence[Position | int]) -> Any:
        """One sample: of a position, or exactly the one with this id. A list as :meth:`__getitems__`."""
        if isinstance(index, Position):
            self._warn_once(
                "each sample is a request of its own, which is slow: give the DataLoader a batch_size, with "
                "collate_fn=list where batches are not to become tensors"
            )
            return self._positions([index])[0]
        if isinstance(index, list):  # of a DataLoader with batch_size=None and a BatchSampler as its sampler
            return self.__getitems__(index)
        return self._exactly([index])[0]

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(text, stacklevel=3)

    def samples_of(self, epoch: int, positions: Int64Array, iteration: int = 0, *, as_many: bool = False) -> list[Any]:
        """The samples that answer positions ``(n,)`` of this rank, by one request. Called by what reads this dataset.

        :param iteration: number of the sampler's iteration, from :meth:`positions_begin`; 0: there is none.
        :param as_many: True: as many samples as positions; where a damaged sample is skipped, another one takes its
            place. False: it is left out.

        Raises :class:`SamplesSkipped` when nobody asks for positions that the sampler has handed out before these.
        """
        if composed := self._guard.other_batches(iteration, positions):
            warnings.warn(
                f"positions {positions[0]} to {positions[-1]} came as a batch, and the sampler has composed batches of "
                f"{composed}, each of classes that belong together: give the DataLoader batch_size={composed}, or the "
                "sampler the DataLoader's",
                stacklevel=2,
            )
        hole = self._guard.asks(iteration, positions)
        batch = self.connection.batch(epoch, positions)
        if hole is not None and not self.allow_skipped:
            self._check_skipped(epoch, hole)
        return self._answered(self.connection, epoch, positions, batch, as_many=as_many)

    def samples_for_rank(self, rank: int, epoch: int, positions: Int64Array) -> list[Any]:
        """The samples that answer positions ``(n,)`` of another rank. Called where one process reads for all ranks, as
        in some trainers.

        They have no ``__key__``, because text can't be sent as tensors are.
        """
        connection = self.connection.of_rank(rank)
        batch = connection.batch(epoch, positions)
        return self._answered(connection, epoch, positions, batch, with_keys=False, as_many=True)

    def is_sampled_by(self, sampler: torch.utils.data.DistributedSampler[Any]) -> None:
        """Called by a sampler of this dataset when it is made in this process."""
        self._samplers.append(weakref.ref(sampler))

    def set_epoch(self, epoch: int) -> None:
        """Calls ``set_epoch`` of this dataset's samplers: for trainers that reach a loader's dataset, and not its
        sampler. It does nothing in a process that has no sampler."""
        checked_epoch(epoch)
        for known in self._samplers:
            if (sampler := known()) is not None:
                sampler.set_epoch(epoch)

    def positions_begin(self, start: int, composed: int = 0) -> int:
        """Called by a sampler of this process when it hands out positions from ``start`` on. Returns a number for this
        iteration.

        :param composed: how many positions a batch has that the sampler composes; 0: it composes none.
        """
        return self._guard.begins(start, composed)

    @property
    def job(self) -> str:
        """The name of the training run."""
        return str(self._settings["name"])

    @property
    def rank(self) -> int:
        """The number of this training process."""
        return self._new_connection().rank if self._connection is None else self._connection.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that share each epoch."""
        return (self._connection or self._new_connection()).spec.world_size

    @property
    def samples_per_rank(self) -> int:
        """How many samples each rank asks for in an epoch; for the order that follows from the seed (``keyed``)."""
        return int(self.connection.info()["samples_per_rank"])

    def positions_in(self, epoch: int) -> int:
        """How many samples this rank asks for in an epoch, or in the rest of one that other ranks or pods resumed; for
        the order that follows from the seed (``keyed``)."""
        resumed = self.connection.info().get("resumed")
        return int(resumed["samples_per_rank"]) if resumed and resumed["epoch"] == epoch else self.samples_per_rank

    @property
    def metadata(self) -> dict[str, Any]:
        """What ``refill pack`` wrote down, such as ``classes``."""
        return dict(self.connection.info()["metadata"])

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes, in the order of their numbers; None if ``refill pack`` found none."""
        found: list[str] | None = self.metadata.get("classes")
        return found

    @property
    def labels(self) -> Int64Array | None:
        """The number in the member ``cls`` of each sample, by id, as an array ``(len(dataset),)``. No samples are read
        for it. None if not all samples have one, or the index was written by an earlier version."""
        if self._labels is None and self.metadata.get("labels"):
            self._labels = self.connection.labels(len(self))
        return self._labels

    @property
    def lengths(self) -> Int64Array:
        """The bytes that each sample takes in the store, by id, as an array ``(len(dataset),)``. No samples are read
        for it."""
        if self._lengths is None:
            self._lengths = self.connection.lengths(len(self))
        return self._lengths

    @property
    def connection(self) -> PodConnection | PlannedConnection:
        """The connection of this process to the pods. Asking for it registers the job and fixes its settings."""
        if self._connection is None:
            connection = self._new_connection()
            if isinstance(connection, PlannedConnection):
                self._connection = connection
                connection.info() if self._resume is None else self._goes_on_from(self._resume, connection)
                return connection
            if self._resume is None:
                connection.info()
            else:
                self._check_is_of_this(self._resume)
                self._start.state_was_loaded()
                connection.resume(self._resume.incarnation, *self._resume.next_place)
            connection.is_rank = False
            if self._is_rank:
                self._be_one_rank(connection)
            self._connection = connection
        return self._connection

    @property
    def policy_settings(self) -> dict[str, Any]:
        """Those that were given."""
        return dict(self._settings.get("policy_settings") or {})

    def register(self) -> None:
        """Register the job now rather than at the first use."""
        self.connection.info()

    def configure(self, **settings: Any) -> None:
        """Give settings of the job, or ``rank``, that were not given before. None leaves one open. Called by samplers.

        Raises :class:`InvalidInput` when another value was given before, or the job is registered with another.
        """
        said = _without_none(settings)
        for name, value in said.items():
            if self._connection is not None:
                known = self._connection.rank if name == "rank" else getattr(self._connection.spec, name)
            else:
                known = self._rank if name == "rank" else self._settings.get(name, value)
            if known is not None and known != value:
                raise InvalidInput(
                    f"{name}={value!r} contradicts the dataset, whose job {self._settings['name']} has {name}={known!r}"
                    f": give {name}={value!r} to CacheDataset"
                )
        if "order" in said:  # by a sampler, or the iterable form: who only looks has none
            self._is_rank = True
            if isinstance(self._connection, PodConnection):
                self._be_one_rank(self._connection)
        rank = said.pop("rank", self._rank)
        before = self._rank, self._settings
        self._rank, self._settings = rank, self._settings | said
        try:
            self._new_connection()
        except InvalidInput:
            self._rank, self._settings = before
            raise

    def _be_one_rank(self, connection: PodConnection) -> None:
        """Two objects of one process that ask as the same rank have one record of what that has received: each would
        else report to a pod that lost its memory its own part alone."""
        connection.is_rank = True
        run = line_of(connection.info()["incarnation"])
        known = _records.get((run, connection.rank))
        if known is None or known.made_in != self._record.made_in:  # of a process that has started this one
            _records[run, connection.rank] = self._record
        elif known is not self._record:
            self._record = known
            connection.use_record(known)
            if known.is_used:
                log.warning(
                    "another CacheDataset of this process has asked as rank %d of job %s: both are that rank, and what "
                    "one of them has asked for comes again as it came, unless a new run begins",
                    connection.rank,
                    self._settings["name"],
                )

    def fetched(self) -> tuple[int, int]:
        """How many samples and bytes this process and its workers have fetched so far, ``(samples, bytes)``."""
        return self._fetched.samples, self._fetched.num_bytes

    @property
    def num_damaged(self) -> int:
        """How many damaged samples this process and its workers have gone on without (``on_damaged="skip"``)."""
        return self._fetched.damaged

    def state_at(self, epoch: int, position: int, length: int, sampler: Any = None) -> dict[str, Any]:
        """The state of a loop of this rank that has come to ``position`` of the ``length`` positions of an epoch.
        Called by ``state_dict`` of ``refill.timed(loader, dataset)``, and of samplers."""
        connection = self.connection
        if isinstance(connection, PlannedConnection):
            return state_at(connection, epoch, position, length).to_dict()
        spec, incarnation = connection.spec, connection.info()["incarnation"]
        found = ResumeState(
            spec.name, spec.dataset, incarnation, spec.world_size, connection.rank, epoch, position, length
        )
        return dataclasses.replace(found, sampler=sampler).to_dict()

    def checked_state(self, state: Any) -> ResumeState:
        """Checks whether this rank can go on from a state, and returns what it says. Called by ``load_state_dict`` of
        the loader, of a sampler and of the iterable form.

        The state may be another rank's: ranks go through an epoch in step, and trainers keep that of rank 0 alone.

        Raises :class:`InvalidInput` for something that is no state, or is one of another job, dataset or world size.
        Raises :class:`JobLost` when the pods no longer know which samples of the epoch the loop has had.
        """
        found = ResumeState.from_dict(state)
        self._check_is_of_this(found)
        if isinstance(connection := self._connection or self._new_connection(), PlannedConnection):
            self._connection = connection
            return self._goes_on_from(found, connection)
        self._start.state_was_loaded()
        if self._resume is not None:
            registered = self.connection
            assert isinstance(registered, PodConnection)
            dealt_anew = place_dealt_anew(found, self._resume, registered)
            if dealt_anew is not None:
                return dealt_anew
        connection = self._connection or self._new_connection()
        if found.world_size != connection.spec.world_size:
            raise InvalidInput(
                f"the state was saved with world_size {found.world_size}, and this job has "
                f"{connection.spec.world_size}: give it to CacheDataset(..., resume=state), on all ranks, and the rest "
                "of the epoch is dealt to those that there are now"
            )
        if found.mid_epoch:
            self.must_remember(found, np.arange(found.position))
        return found

    def _goes_on_from(self, state: ResumeState, connection: PlannedConnection) -> ResumeState:
        """The place of this rank in what a state leaves of its epoch; dealt anew if the number of ranks has changed."""
        self._check_is_of_this(state)
        return goes_on_from(state, connection)

    def _check_is_of_this(self, state: ResumeState) -> None:
        check_is_of(state, self._settings["name"], self._settings["dataset"])

    def must_remember(self, state: ResumeState, consumed: Int64Array) -> None:
        """Called when a state is loaded. Raises :class:`JobLost` when the pods can't know which samples they gave
        before it was saved.

        :param consumed: the positions ``(n,)`` of the state's epoch that the loop, or its worker, has had.
        """
        if isinstance(self.connection, PodConnection):  # else any pod knows it
            check_is_remembered(state, consumed, self.connection, self._record)

    def check_epoch_length(self, state: ResumeState) -> None:
        """Called when a state is loaded. Raises :class:`InvalidInput` when an epoch has another length than it says."""
        if state.length != self.positions_in(state.epoch):
            raise InvalidInput(
                f"the state counts {state.length} samples of rank {state.rank} in an epoch, and there are "
                f"{self.positions_in(state.epoch)}: the dataset or drop_last has changed since it was saved"
            )

    def epoch_counts(self, epoch: int) -> dict[str, Any]:
        """What the pods counted in an epoch: ``{"total": {...}, "pods": [...]}``. Also after the job has ended."""
        return (self._connection or self._new_connection()).epoch_counts(epoch)

    def end_job(self) -> None:
        """End the job on all pods, and free its memory. It is enough that one rank calls it."""
        (self._connection or self._new_connection()).end_job()

    def _positions(self, indices: Sequence[Any]) -> list[Any]:
        try:
            asked = np.array(indices, dtype=np.int64).reshape(len(indices), len(Position._fields))
        except ValueError as error:
            raise InvalidInput("a batch mixes positions and plain integers; use one sampler for it") from error
        epochs, positions, iterations, ranks = asked[asked[:, 1] >= 0].T
        if not len(epochs):
            return []
        first, last = int(epochs.min()), int(epochs.max())
        if first != last:
            raise InvalidInput(f"a batch mixes epochs {first} and {last}; call set_epoch before iterating, not within")
        if ranks[0] < 0:
            return self.samples_of(first, np.ascontiguousarray(positions), int(iterations[0]))
        samples: list[Any] = []
        for rank in dict.fromkeys(ranks.tolist()):
            samples += self.samples_for_rank(rank, first, np.ascontiguousarray(positions[ranks == rank]))
        return samples

    def _check_skipped(self, epoch: int, hole: Hole) -> None:
        """Whether pods, too, have never been asked for what is missing here: a loop may go on where another one ended,
        by skipping batches that were trained with."""
        if not self.left_out(epoch, hole.start, hole.end):
            return
        raise SamplesSkipped(
            f"rank {self.rank} of job {self.job} asks for a part of its positions only: in epoch {epoch} "
            f"it left out {hole.start} to {hole.end - 1} ({hole.pattern}), whose samples would be lost. Something "
            "divides them a second time, or skips batches. Lightning and Accelerate: give the trainer "
            "DataLoader(dataset, batch_size, sampler=EpochSampler(dataset)) as it is; others: switch off what wraps or "
            "shards its sampler (docs/TRAINERS.md). allow_skipped=True, given to the dataset, allows it",
            epoch=epoch,
            rank=self.rank,
            start=hole.start,
            end=hole.end,
        )

    def left_out(self, epoch: int, start: int, end: int) -> bool:
        """Whether pods know that this rank has asked for none or a part of these positions so far, in any process.
        Called by what reads this dataset."""
        for wait_seconds in _ASK_AGAIN_AFTER_SECONDS:
            if not self.connection.skipped(epoch, start, end):
                return False
            time.sleep(wait_seconds)  # a request of another thread may be on its way
        return True

    def _exactly(self, indices: Sequence[Any]) -> list[Any]:
        ids = np.array([operator.index(index) for index in indices], dtype=np.int64)
        ids = np.where(ids < 0, ids + len(self), ids)
        if wrong := [index for index, sample_id in zip(indices, ids, strict=True) if not 0 <= sample_id < len(self)]:
            raise IndexError(f"there is no sample {wrong[0]}; the dataset has samples 0 to {len(self) - 1}")
        return self._received(self.connection.samples(ids))

    def _received(self, batch: ReceivedBatch) -> list[Any]:
        self._fetched.add(len(batch.payloads), batch.num_bytes)
        return [self._decoded(batch, place) for place in range(len(batch.payloads))]

    def _answered(
        self,
        connection: PodConnection | PlannedConnection,
        epoch: int,
        positions: Int64Array,
        batch: ReceivedBatch,
        *,
        with_keys: bool = True,
        as_many: bool,
    ) -> list[Any]:
        if not self._skips_damaged:
            self._fetched.add(len(batch.payloads), batch.num_bytes)
            return self._said_to_be_alike(
                [self._decoded(batch, place, with_keys) for place in range(len(batch.payloads))]
            )
        samples: list[Any] = []
        damaged: dict[int, RefillError] = {}
        for place in range(len(batch.payloads)):
            try:
                samples.append(self._decoded(batch, place, with_keys))
            except SampleDamaged as error:
                damaged[place] = error
        self._fetched.add(len(samples), batch.num_bytes, len(damaged))
        if samples:
            self._spare = samples[-1]
        if damaged:
            places = list(damaged)
            connection.goes_without(epoch, positions[places], batch.sample_ids[places], list(damaged.values()))
            if as_many or not samples:
                stand_in = samples[0] if samples else self._stand_in(int(batch.sample_ids[0]), damaged[0])
                for place in places if as_many else places[:1]:
                    samples.insert(place, stand_in)
        return self._said_to_be_alike(samples)

    def _said_to_be_alike(self, samples: list[Any]) -> list[Any]:
        """Warns once of a batch that torch does not put together: its error would name neither sample nor remedy."""
        if not self._warned_of_members and (why := why_not_alike(samples)) is not None:
            self._warned_of_members = True
            warnings.warn(why, stacklevel=2)
        return samples

    def _stand_in(self, sample_id: int, damaged: RefillError) -> Any:
        """A sample that comes a second time, for a batch of which nothing is left: it can't be empty, nor can it be
        left out, since ranks take their steps together. Raises ``damaged`` when there is none to be had."""
        if self._spare is None and self.connection.spec.order == "keyed":  # else any may be one that is not asked for
            for step in range(1, _STAND_INS + 1):
                other = (sample_id + step * len(self) // (_STAND_INS + 1)) % len(self)
                with contextlib.suppress(SampleDamaged):
                    self._spare = self._exactly([other])[0]
                    break
        if self._spare is None:
            raise damaged
        return self._spare

    def _new_connection(self) -> PodConnection | PlannedConnection:
        default_rank, default_world_size = _place_in_world()
        spec = JobSpec.from_dict({"world_size": default_world_size} | self._settings)
        rank = default_rank if self._rank is None else self._rank
        if not 0 <= rank < spec.world_size:
            raise InvalidInput(
                f"rank {rank} is not one of the {spec.world_size} ranks of world_size; give both together"
            )
        if spec.is_planned:
            return PlannedConnection(
                self._service_url,
                spec,
                rank,
                self._home,
                self._timeout_seconds,
                self._credentials,
                self.allow_skipped,
                self._connect_timeout_seconds,
                goes_without_damaged=self._skips_damaged,
                place=self._place,
                groups=self._groups,
            )
        return PodConnection(
            self._service_url,
            spec,
            rank,
            self._home,
            self._timeout_seconds,
            self._record,
            self._credentials,
            self.allow_skipped,
            self._connect_timeout_seconds,
            goes_without_damaged=self._skips_damaged,
            start=self._start,
        )


def _check_spelling(settings: Mapping[str, Any]) -> None:
    """Arguments of the dataset are no settings of the job, so that pods can't name the one that is meant."""
    arguments = list(inspect.signature(CacheDataset.__init__).parameters)[1:-1]
    known = [field.name for field in dataclasses.fields(JobSpec) if field.name not in ("name", "holder")]
    for name in settings:
        if name not in known and (near := difflib.get_close_matches(name, [*arguments, *known], 1)):
            raise InvalidInput(f"CacheDataset has no argument {name!r} (is {near[0]} meant?)")


def _without_none(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _place_in_world() -> tuple[int, int]:
    """``(rank, world size)`` as the training launcher has set them."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise InvalidInput(
            f"RANK={os.environ.get('RANK')!r} and WORLD_SIZE={os.environ.get('WORLD_SIZE')!r} must be numbers"
        ) from error
