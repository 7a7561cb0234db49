"""What does a rank read of a job? Its samples by positions and by ids, its places in epochs, its end. No torch here.

:class:`refill.CacheDataset` makes a PyTorch dataset of it, and :func:`refill.iterate` a loop without PyTorch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import operator
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from refill.errors import InvalidInput, JobConflict, RefillError, SampleDamaged
from refill.formats.asked_members import AskedMembers
from refill.formats.decoders import Decode, as_view
from refill.formats.sample_decoder import SampleDecoder, Transform
from refill.loops.epoch_place import checked_epoch
from refill.loops.lightning_place import said_of_ranks
from refill.pods.answer_checks import read_as_of_a_pod
from refill.pods.batch_groups import BatchGroups, batch_groups
from refill.pods.credentials import Credentials
from refill.pods.fetched_counts import FetchedCounts
from refill.pods.index_reads import DatasetIndex, labels_in
from refill.pods.loop_digest import ReceivedHashes
from refill.pods.own_life import is_of_this_process, own_life
from refill.pods.planned_connection import PlannedConnection
from refill.pods.planned_place import DealtConnection, RankPlace, goes_on_from, state_at
from refill.pods.pod_connection import PodConnection, RunOfRank
from refill.pods.received_batch import ReceivedBatch
from refill.pods.resume_state import ResumeState
from refill.protocol.column_values import LABELS, ColumnValues, is_column_name, joined_values
from refill.protocol.job_spec import JobSpec
from refill.protocol.sample_cut import SampleCut
from refill.protocol.wire_format import MAX_BATCH, Int64Array

__all__ = ["JobSamples"]

_OF_LOADERS = ("batch_size", "num_workers", "collate_fn", "sampler", "batch_sampler", "pin_memory")
_STAND_INS = 16
"""So many samples, from all over the dataset, are tried in place of a first batch that is all damaged."""


class JobSamples:
    """The samples of a job, as one rank asks for them. Parameters as those of :class:`refill.CacheDataset`."""

    _called: ClassVar[str]
    """By the name that a caller knows, in errors."""

    def __init__(
        self,
        service_url: str = "",
        *,
        dataset: str = "",
        job: str = "",
        rank: int | None = None,
        world_size: int | None = None,
        seed: int | None = None,
        read_seed: int | None = None,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        decode: Decode = None,
        transform: Transform | None = None,
        as_tuple: Sequence[str] | None = None,
        home: str | None = None,
        token_file: str | None = None,
        ca_file: str | None = None,
        timeout_seconds: float = 300.0,
        connect_timeout_seconds: float = 2.0,
        resume: Any = None,
        allow_skipped: bool = False,
        on_damaged: str = "raise",
        batch_group: Any = None,
        members: Sequence[str] | None = None,
        ranges: Mapping[str, tuple[int, int]] | None = None,
        **settings: Any,
    ) -> None:
        for name, value, example in (("dataset", dataset, "s3://bucket/images"), ("job", job, "run-1")):
            if value == "":  # Python's own error would name this class, which nobody has called
                raise InvalidInput(f"{self._called} needs {name}=, as {name}={example!r}")
        if "name" in settings:
            raise InvalidInput(f"{self._called} has no setting 'name': job={job!r} is the job's name")
        if "holder" in settings:
            raise InvalidInput(f"{self._called} has no setting 'holder': pods take it from the token")
        _check_spelling(self._called, settings)
        if on_damaged not in ("raise", "skip"):
            raise InvalidInput(f"on_damaged must be 'raise' or 'skip', got {on_damaged!r}")
        self._groups = BatchGroups() if batch_group is None else batch_groups(batch_group)
        if self._groups.size > 1:
            settings = settings | {"batch_group": self._groups.size}
        said: dict[str, Any] = {"world_size": world_size, "seed": seed, "read_seed": read_seed, "shuffle": shuffle}
        said |= {"drop_last": drop_last, **settings}
        self._settings = {"name": job, "dataset": dataset} | _plain(_without_none(said))
        self._rank = rank
        self._service_url = service_url
        self._home = home
        self._credentials = Credentials(token_file, ca_file)
        self._timeout_seconds = timeout_seconds
        self._connect_timeout_seconds = connect_timeout_seconds
        self._cut = SampleCut.of(members, ranges)
        self._asked = AskedMembers(decode, self._cut, self._shared)
        self._decoded = SampleDecoder(
            decode, transform, as_tuple, cut=self._cut, viewed=self._viewed, asked=self._asked
        )
        self._resume = None if resume is None else ResumeState.from_dict(resume)
        self.allow_skipped = allow_skipped
        self._skips_damaged = on_damaged == "skip"
        self._begin()
        self._new_connection()  # a wrong URL or setting fails here, not at the first batch

    def __repr__(self) -> str:
        """Asks no pod, and shows nothing that may be secret."""
        url, dataset = map(_without_secrets, (self._service_url, self._settings["dataset"]))
        about = f"{url!r}, dataset={dataset!r}, job={self.job!r}, rank={self.rank}, world_size={self.world_size}"
        if self._num_samples is not None:
            about += f", num_samples={self._num_samples}"
        return f"{type(self).__name__}({about})"

    def _check_views(self) -> None:
        """Raises :class:`InvalidInput` where views can't be given to the loop."""

    @staticmethod
    def _viewed(data: memoryview) -> Any:
        """Of bytes in a buffer, a view."""
        return as_view(data)

    def _begin(self) -> None:
        """As an object that has asked for nothing yet."""
        self._spare: Any = None
        """A sample that came, for a batch of which nothing else is left."""
        self._connection: PodConnection | DealtConnection | None = None
        self._num_samples: int | None = None
        self._labels: Int64Array | None = None
        self._lengths: Int64Array | None = None
        self._about: dict[str, Any] | None = None
        """What pods said of the dataset before the job was registered."""
        self._reads_index: DatasetIndex | None = None
        self._share()

    def _share(self) -> None:
        """What the processes of this rank know together: the training process, and its loader workers."""
        self._made_in = os.getpid()
        self._fetched = FetchedCounts(self._shared(FetchedCounts.SHAPE))
        self._run = RunOfRank(self._shared(RunOfRank.NUM_SHARED))
        self._place = RankPlace(self._shared(RankPlace.NUM_SHARED))
        is_planned = self._settings.get("policy", JobSpec.policy) == "planned"
        self._hashes = ReceivedHashes(self._shared(ReceivedHashes.SHAPE)) if is_planned else None

    def _begins_here(self) -> None:
        """Called before the job is registered. An object that several ranks are started with has been copied to each
        (``torch.multiprocessing.spawn``): they share nothing."""
        if self._made_in != os.getpid() and is_of_this_process(own_life(self._made_in)):
            self._share()

    def _shared(self, shape: int | tuple[int, ...]) -> Any:
        """Zeros, int64, in memory that all processes share to which this object is copied."""
        return np.zeros(shape, dtype=np.int64)

    @property
    def num_samples(self) -> int:
        """Number of samples of the whole dataset. To ask for it registers no job."""
        if self._num_samples is None:
            goes_on = self._resume is not None and self._resume.plan is not None
            # Of a version of the dataset that may have more samples now.
            known = self.connection if goes_on else self._connection
            self._num_samples = (known or self._new_connection()).num_samples()
        return self._num_samples

    def asks_in_batches(self, batch_size: int, workers: int = 0) -> None:
        """Called before an iteration begins whose loader makes batches of so many, by so many workers."""
        if isinstance(connection := self.connection, DealtConnection):
            if batch_size > MAX_BATCH and connection.spec.shuffle and not connection.spec.is_listed:
                raise InvalidInput(
                    f"a rank is dealt {MAX_BATCH:,} samples at once at most, got batches of {batch_size:,}: make them "
                    "smaller, and join several"
                )
            connection.asks_in_batches(batch_size, workers)

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
    def may_be_divided(self) -> bool:
        """Called where a trainer may divide what this rank reads: whether no promised sample is lost then."""
        return self.allow_skipped or self.connection.spec.num_groups <= 1

    @property
    def samples_per_rank(self) -> int:
        """How many samples each rank asks for in an epoch; for the order that follows from the seed (``keyed``)."""
        return int(self.connection.info()["samples_per_rank"])

    def positions_in(self, epoch: int) -> int:
        """How many samples this rank asks for in an epoch, or in the rest of one that a state leaves; for the order
        that follows from the seed (``keyed``)."""
        if isinstance(connection := self.connection, DealtConnection):
            return connection.samples_in(epoch)
        return self.samples_per_rank

    @property
    def metadata(self) -> dict[str, Any]:
        """What ``refill pack`` wrote down, such as ``classes``."""
        if self._index() is not None and self._about is not None:
            return dict(self._about["metadata"])
        return dict(self.connection.info()["metadata"])

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes, in the order of their numbers; None if ``refill pack`` found none."""
        found: list[str] | None = self.metadata.get("classes")
        return found

    def _index(self) -> DatasetIndex | None:
        """What reads the index, as long as nothing else has registered the job: a sampler may have settings for it
        that follow from what the index says. None: the job does, whose state may be of an earlier version."""
        if self._connection is not None or self._resume is not None:
            return None
        if self._about is None and (index := self._new_connection().index()) is not None:
            self._about, self._reads_index = index.about(), index
        return None if self._about is None else self._reads_index

    @property
    def labels(self) -> Int64Array | None:
        """The number in the member ``cls`` of each sample, by id, as an array ``(len(dataset),)``. No samples are read
        for it. None if not all samples have one."""
        if self._labels is None and self.metadata.get("labels"):
            blocks, pod = self._column(LABELS)
            self._labels = labels_in(blocks, pod)
        return self._labels

    @property
    def lengths(self) -> Int64Array:
        """The bytes that each sample takes in the store, by id, as an array ``(len(dataset),)``. No samples are read
        for it."""
        if self._lengths is None:
            self._lengths = (self._index() or self.connection).lengths(self.num_samples)
        return self._lengths

    def column(self, name: str) -> ColumnValues:
        """A column of the index, by id: ``(len(dataset),)`` int64 or float64, NaN where a sample has none; or a list of
        texts. ``refill index --column`` writes them. No samples are read for it.

        Raises :class:`InvalidInput` for one that the dataset does not have.
        """
        blocks, pod = self._column(name)
        every = list(blocks)
        with read_as_of_a_pod(pod):
            return joined_values(every)

    def _column(self, name: str) -> tuple[Iterator[ColumnValues], str]:
        """Its blocks, and who is asked for them."""
        if not is_column_name(name):
            raise InvalidInput(f"a column has a name of up to 64 of the letters A-Z a-z 0-9 _ . -, got {name!r:.100}")
        if (index := self._index()) is not None:
            return index.column(name, self.num_samples), index.pod
        return self.connection.column(name, self.num_samples), self.connection.home

    def epoch_counts(self, epoch: int) -> dict[str, Any]:
        """What the pods counted in an epoch: ``{"total": {...}, "pods": [...]}``. Also after the job has ended."""
        return (self._connection or self._new_connection()).epoch_counts(checked_epoch(epoch))

    def end_job(self) -> None:
        """End the job on all pods, and free its memory. It is enough that one rank calls it."""
        (self._connection or self._new_connection()).end_job()

    def register(self) -> None:
        """Register the job now rather than at the first use."""
        self.connection.info()

    def fetched(self) -> tuple[int, int]:
        """How many samples and bytes this process and its workers have fetched so far, ``(samples, bytes)``."""
        return self._fetched.samples, self._fetched.num_bytes

    @property
    def num_damaged(self) -> int:
        """How many damaged samples this process and its workers have gone on without (``on_damaged="skip"``)."""
        return self._fetched.damaged

    @property
    def connection(self) -> PodConnection | DealtConnection:
        """The connection of this process to the pods. Called by what reads this; it registers the job."""
        if self._connection is None:
            self._begins_here()
            connection = self._new_connection()
            try:
                if self._resume is not None:
                    self._goes_on_from(self._resume, connection)
                connection.info()
            except JobConflict as error:
                raise said_of_ranks(error) from None
            self._check_version(connection)
            self._connection, self._reads_index = connection, None
            _tell_of_missing_ranks(connection.spec)
        return self._connection

    def _check_version(self, connection: PodConnection | DealtConnection) -> None:
        """Raises :class:`JobConflict` where it is another version by now than the one whose index was read."""
        if self._about is not None and self._about["fingerprint"] != connection.info().get("fingerprint"):
            url, self._about, self._labels, self._lengths = self._settings["dataset"], None, None, None
            raise JobConflict(f"dataset {url} was replaced since its index was read here: begin anew")

    @property
    def policy(self) -> str:
        """How pods choose samples: docs/ORDERS.md. Called by samplers."""
        return (self._connection or self._new_connection()).spec.policy

    def selects_by(self, digest: str) -> None:
        """Called by samplers that compose batches of classes, with policy ``planned``: ranks whose classes have another
        digest are refused. A job that is registered already goes on without."""
        if self._connection is None:
            self._settings = self._settings | {"policy_settings": self.policy_settings | {"selection": digest}}

    @property
    def policy_settings(self) -> dict[str, Any]:
        """Those that were given. Called by samplers."""
        return dict(self._settings.get("policy_settings") or {})

    def configure(self, **settings: Any) -> None:
        """Give settings of the job, or ``rank``, that were not given before. None leaves one open. Called by samplers.

        Raises :class:`InvalidInput` when another value was given before, or the job is registered with another.
        """
        said = _plain(_without_none(settings))
        for name, value in said.items():
            if self._connection is not None:
                known = self._connection.rank if name == "rank" else getattr(self._connection.spec, name)
            else:
                known = self._rank if name == "rank" else self._settings.get(name, value)
            if known is not None and known != value:
                too_late = "" if self._connection is None else ", or make the sampler before a sample is asked for"
                raise InvalidInput(
                    f"{name}={value!r} contradicts the dataset, whose job {self._settings['name']} has {name}={known!r}"
                    f": give {name}={value!r} to CacheDataset{too_late}"
                )
        rank = said.pop("rank", self._rank)
        before = self._rank, self._settings
        self._rank, self._settings = rank, self._settings | said
        try:
            self._new_connection()
        except InvalidInput:
            self._rank, self._settings = before
            raise

    def state_at(self, epoch: int, position: int, length: int, sampler: Any = None) -> dict[str, Any]:
        """The state of a loop of this rank that has come to ``position`` of the ``length`` positions of an epoch.
        Called by ``state_dict`` of ``refill.timed(loader, dataset)``, and of samplers."""
        connection = self.connection
        if isinstance(connection, DealtConnection):
            return dataclasses.replace(state_at(connection, epoch, position, length), sampler=sampler).to_dict()
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
        if self._connection is None:
            self._begins_here()
        connection = self._connection or self._new_connection()
        found = self._goes_on_from(ResumeState.from_dict(state), connection)
        connection.info()
        self._check_version(connection)
        self._connection, self._num_samples = connection, None
        return found

    def _goes_on_from(self, state: ResumeState, connection: PodConnection | DealtConnection) -> ResumeState:
        """The place of this rank in what a state leaves of its epoch; where the order is planned, dealt anew if the
        number of ranks has changed."""
        state.check_is_of(self._settings["name"], self._settings["dataset"])
        if isinstance(connection, DealtConnection):
            return goes_on_from(state, connection)
        state.check_num_ranks(connection.spec)
        if state.mid_epoch:
            self._must_remember(state, connection)
        return state

    def must_remember(self, state: ResumeState) -> None:
        """Called when the state of a loader worker is loaded, that has had some of its epoch. Raises :class:`JobLost`
        when the pods can't know which samples they gave before it was saved."""
        if isinstance(self.connection, PodConnection):  # else any pod knows it
            self._must_remember(state, self.connection)

    @staticmethod
    def _must_remember(state: ResumeState, connection: PodConnection) -> None:
        spec = connection.spec
        if spec.shuffle or spec.order != "keyed":  # else any pod gives the same
            connection.goes_on(state.incarnation, state.epoch)

    def check_epoch_length(self, state: ResumeState) -> None:
        """Called when a state is loaded. Raises :class:`InvalidInput` when an epoch has another length than it says."""
        if state.length != self.positions_in(state.epoch):
            raise InvalidInput(
                f"the state counts {state.length} samples of rank {state.rank} in an epoch, and there are "
                f"{self.positions_in(state.epoch)}: the dataset or drop_last has changed since it was saved"
            )

    def _exactly(self, indices: Sequence[Any]) -> list[Any]:
        for index in indices:
            if not hasattr(index, "__index__"):
                raise InvalidInput(f"a sample has a number, as dataset[7]; got {index!r:.100} in its place")
        ids = np.array([operator.index(index) for index in indices], dtype=np.int64)
        ids = np.where(ids < 0, ids + self.num_samples, ids)
        if wrong := [
            index for index, sample_id in zip(indices, ids, strict=True) if not 0 <= sample_id < self.num_samples
        ]:
            raise IndexError(f"there is no sample {wrong[0]}; the dataset has samples 0 to {self.num_samples - 1}")
        return self._received(self.connection.samples(ids))

    def _received(self, batch: ReceivedBatch) -> list[Any]:
        self._fetched.add(len(batch.payloads), batch.num_bytes)
        self._know_format(self.connection)
        return [self._decoded(batch, place) for place in range(len(batch.payloads))]

    def _know_format(self, connection: PodConnection | DealtConnection) -> None:
        if not self._decoded.knows_dataset:
            info = connection.info()
            self._decoded.dataset_is(info.get("metadata", {}), lambda: self.labels)
            self._asked.begin(info["num_samples"] // connection.spec.world_size)

    def _answered(
        self,
        connection: PodConnection | DealtConnection,
        epoch: int,
        positions: Int64Array,
        batch: ReceivedBatch,
        *,
        with_keys: bool = True,
        as_many: bool,
    ) -> list[Any]:
        self._know_format(connection)
        self._check_views()
        if not self._skips_damaged:
            self._fetched.add(len(batch.payloads), batch.num_bytes)
            return [self._decoded(batch, place, with_keys) for place in range(len(batch.payloads))]
        by_place, damaged = self._intact(batch, with_keys=with_keys)
        samples = list(by_place.values())
        if samples:
            self._spare = samples[-1]
        if damaged:
            places = list(damaged)
            connection.goes_without(epoch, positions[places], batch.sample_ids[places], list(damaged.values()))
            if as_many or not samples:
                stand_in = samples[0] if samples else self._stand_in(int(batch.sample_ids[0]), damaged[0])
                for place in places if as_many else places[:1]:
                    samples.insert(place, stand_in)
        return samples

    def _intact(self, batch: ReceivedBatch, *, with_keys: bool = True) -> tuple[dict[int, Any], dict[int, RefillError]]:
        """By place, the samples of a batch, and why others are none."""
        samples: dict[int, Any] = {}
        damaged: dict[int, RefillError] = {}
        for place in range(len(batch.payloads)):
            try:
                samples[place] = self._decoded(batch, place, with_keys)
            except SampleDamaged as error:
                damaged[place] = error
        self._fetched.add(len(samples), batch.num_bytes, len(damaged))
        return samples, damaged

    def _stand_in(self, sample_id: int, damaged: RefillError) -> Any:
        """A sample that comes a second time, for a batch of which nothing is left: it can't be empty, nor can it be
        left out, since ranks take their steps together. Raises ``damaged`` when there is none to be had."""
        if self._spare is None and self.connection.spec.order == "keyed":  # else any may be one that is not asked for
            for step in range(1, _STAND_INS + 1):
                other = (sample_id + step * self.num_samples // (_STAND_INS + 1)) % self.num_samples
                with contextlib.suppress(SampleDamaged):
                    self._spare = self._exactly([other])[0]
                    break
        if self._spare is None:
            raise damaged
        return self._spare

    def _spec_and_rank(self) -> tuple[JobSpec, int]:
        """Raises :class:`InvalidInput` for settings that no job has."""
        default_rank, default_world_size = _place_in_world()
        spec = JobSpec.from_dict({"world_size": default_world_size} | self._settings)
        rank = default_rank if self._rank is None else self._rank
        if not isinstance(rank, (int, np.integer)) or not 0 <= rank < spec.world_size:
            raise InvalidInput(
                f"rank {rank!r} is not one of the {spec.world_size} ranks of world_size; give both together"
            )
        return spec, rank

    def _new_connection(self) -> PodConnection | DealtConnection:
        spec, rank = self._spec_and_rank()
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
                hashes=self._hashes,
                cut=self._cut,
            )
        if not self._cut.is_whole:
            raise InvalidInput(f"members and ranges go with policy planned, and this job has policy {spec.policy}")
        return PodConnection(
            self._service_url,
            spec,
            rank,
            self._home,
            self._timeout_seconds,
            self._credentials,
            self.allow_skipped,
            self._connect_timeout_seconds,
            goes_without_damaged=self._skips_damaged,
            run=self._run,
        )


def _check_spelling(called: str, settings: Mapping[str, Any]) -> None:
    """Arguments of the dataset are no settings of the job, so that pods can't name the one that is meant."""
    arguments = list(inspect.signature(JobSamples.__init__).parameters)[1:-1]
    known = [field.name for field in dataclasses.fields(JobSpec) if field.name not in ("name", "holder")]
    for name in settings:
        if name in _OF_LOADERS:
            raise InvalidInput(f"{called} has no argument {name!r}: give it to the DataLoader")
        if name not in known and (near := difflib.get_close_matches(name, [*arguments, *known], 1)):
            raise InvalidInput(f"{called} has no argument {name!r} (is {near[0]} meant?)")


def _without_secrets(url: Any) -> str:
    """Names, passwords and signatures of a URL stay out of logs."""
    return re.sub(r"//[^/]*@", "//", str(url)).partition("?")[0]


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """numpy's numbers as Python's, and 0 and 1 where torch takes them for False and True."""
    found = {name: value.item() if isinstance(value, np.generic) else value for name, value in settings.items()}
    for name in ("shuffle", "drop_last"):
        if type(found.get(name)) is int and found[name] in (0, 1):
            found[name] = bool(found[name])
    if isinstance(of_policy := found.get("policy_settings"), dict):
        found["policy_settings"] = _plain(of_policy)
    return found


def _without_none(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _tell_of_missing_ranks(spec: JobSpec) -> None:
    """Warns where there are more ranks than processes. Less may be: one that reads for all, or ranks that share."""
    processes = _place_in_world()[1]
    whose = "the process group" if _process_group() else "WORLD_SIZE" if "WORLD_SIZE" in os.environ else None
    if whose is not None and spec.world_size > processes:
        warnings.warn(
            f"job {spec.name} has world_size={spec.world_size}, and {whose} has {processes}: if so many processes read "
            f"it, {spec.world_size - processes} of {spec.world_size} parts of each epoch never come. Leave rank= and "
            "world_size= out (num_replicas= of a sampler), or correct them",
            stacklevel=2,
        )


def _process_group() -> Any:
    """torch.distributed, where it is initialised."""
    distributed: Any = sys.modules.get("torch.distributed")  # who has not imported it has not initialised it
    is_there = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if is_there else None


def _place_in_world() -> tuple[int, int]:
    """``(rank, world size)`` as the training launcher has set them."""
    if distributed := _process_group():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise InvalidInput(
            f"RANK={os.environ.get('RANK')!r} and WORLD_SIZE={os.environ.get('WORLD_SIZE')!r} must be numbers"
        ) from error
