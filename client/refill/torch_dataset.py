"""How does a batch reach a PyTorch loop? The data path of the client, from top to bottom."""

from __future__ import annotations

import copy
import os
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils.data
from numpy.typing import ArrayLike

from refill.errors import EpochNotReady, InvalidInput, RankTaken, SamplesSkipped
from refill.formats.sample_decoder import why_not_alike
from refill.job_samples import JobSamples
from refill.loops.epoch_place import checked_epoch
from refill.loops.hole_guard import Hole, HoleGuard
from refill.loops.lightning_place import said_of_rank
from refill.loops.loader_batch import check_one_shape, tensor_of
from refill.loops.position import Position, job_number
from refill.loops.shared_blocks import share_again, shared_zeros
from refill.loops.trainer_division import check_divided_once
from refill.pods.other_parts import OtherParts
from refill.pods.planned_connection import PlannedConnection
from refill.pods.planned_place import DealtConnection
from refill.pods.pod_connection import PodConnection
from refill.pods.resume_state import ResumeState
from refill.protocol import part_choice
from refill.protocol.column_values import KEYS
from refill.protocol.keyed_hash import UInt64Array
from refill.protocol.part_names import job_of_part, whole_of
from refill.protocol.wire_format import Int64Array

__all__ = ["CacheDataset"]

_ASK_AGAIN_AFTER_SECONDS = (0.1, 0.3, 0.6)
"""Before samples are called skipped, pods are asked so often, with these pauses."""


class CacheDataset(JobSamples, torch.utils.data.Dataset[Any]):
    """A PyTorch dataset (map-style) whose samples come from the pods, one request for each batch.

    Use it in any DataLoader with :class:`EpochSampler`, or with :class:`TraceSampler` around a sampler of your own.
    Workers may be forked or spawned, persistent or not. A sample is ``{"__key__": str, "__id__": int, extension:
    value}``. A plain integer works as an index, too, and gives exactly the sample with that id. It is read from the
    store alone: good for a look, slow for training.

    ``torch.utils.data.Subset`` and ``random_split`` work: give :class:`EpochSampler` the part in place of the dataset.

    :param service_url: URL of the service or of any pod, ``http://refill:8000``.
    :param dataset: URL of the dataset as the pods reach it, ``s3://bucket/prefix``.
    :param job: name of the training run. All its ranks give the same name; another run takes another one.
    :param rank, world_size: the number of this training process, and how many there are. None: those of
        torch.distributed, else of the variables RANK and WORLD_SIZE, else 0 of 1.
    :param seed, shuffle, drop_last: as in DistributedSampler. None: what the sampler is given, else 0, True, False.
    :param read_seed: of a sweep, the same for all its jobs: docs/CLIENT.md, "Sweeps". None: the job reads alone.
    :param decode: None leaves the members of a sample as bytes. True decodes them by extension. A mapping of
        extensions to functions, or one function, decodes them your way. ``"views"`` gives bytes as tensors, without a
        copy: docs/CLIENT.md, "Samples".
    :param transform: called with each sample; what it returns takes the sample's place.
    :param as_tuple: names of members, ``("jpg", "cls")``: a sample is then the tuple of these, as of WebDataset's
        ``to_tuple``. ``"jpg;png"`` is the first of them that the sample has. Raises :class:`InvalidInput` for a sample
        that has none.
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
        any rank's. The loader or the sampler loads the state, too. Right with the same ranks and pods as well. With a
        live policy, ``redox`` or ``exact``, the number of ranks stays, and the job is registered as the run that the
        state is of: :class:`refill.errors.JobLost` where the pods have it no more.
    :param allow_skipped: True: a sampler may leave out positions, and their samples are lost. Otherwise that is an
        error (:class:`refill.errors.SamplesSkipped`): it happens when a trainer divides a sampler a second time.
    :param members: names of the members that come of each sample, as ``["json", "cls"]``: the others stay with the
        pods. None: all. Of most formats (docs/CLIENT.md), with policy ``planned``.
    :param ranges: of which members a range of bytes comes, ``{"mp4": (0, 65536)}``: the first byte, and how many. A
        shorter member gives what it has.
    :param on_damaged: ``"raise"``: a sample whose bytes are damaged, or that can't be decoded, is an error
        (:class:`refill.errors.SampleDamaged`). ``"skip"``: the run goes on without it. Its batch is one sample shorter,
        and the receipt names it. A batch of which nothing is left has one other sample, which comes twice.
    :param batch_group: how many ranks in a row share each batch, as in tensor, context or pipeline parallel training;
        or the dimensions of a ``torch.distributed`` DeviceMesh whose ranks do, ``mesh["tp"]``, ``mesh["pp", "tp"]``.
        All of a group get the same batches, which are read once. Goes with ``policy="planned"``.
    :param settings: further settings of the job, such as ``chunk_size``: docs/SETTINGS.md, "Settings of a job".

    The job is registered with the pods at the first use: when a sampler of refill's is made, or a sample is asked for.
    Then its settings are fixed. ``len(dataset)``, ``labels`` and what else the index says register nothing.

    Errors are of :mod:`refill.errors`.
    """

    _called = "CacheDataset"

    def _begin(self) -> None:
        super()._begin()
        self._job_number = job_number(self.job)
        self._warned: set[tuple[int, str]] = set()
        """In which process of what."""
        self._read_alone = (0, 0)
        """The process, and how many samples it has read one by one."""
        self._samplers: list[weakref.ref[torch.utils.data.DistributedSampler[Any]]] = []
        self._whole: CacheDataset | None = None
        """Of a part, the dataset that it is of."""
        self._parts: weakref.WeakValueDictionary[str, CacheDataset] = weakref.WeakValueDictionary()
        """By their jobs, as long as a Subset reads them: each has connections, threads and shared memory of its own."""
        self._resumed_part: CacheDataset | None = None
        self._made: list[str] = []
        """Those jobs; of a part, those of all parts of its dataset."""
        self._others: OtherParts | None = None
        """Of a part that several ranks read."""
        self._state_of_part: ResumeState | None = None
        if self._resume is not None and whole_of(self._resume.job) == self.job:
            self._resume, self._state_of_part = None, self._resume

    def _share(self) -> None:
        self._blocks: list[torch.Tensor] = []
        super()._share()
        self._guard = HoleGuard()

    def _check_views(self) -> None:
        if self._decoded.gives_views and torch.utils.data.get_worker_info() is not None:
            raise InvalidInput(
                "decode gives views, which a loader worker would send one by one, slowly and with a descriptor each: "
                "use num_workers=0, or refill.iterate, whose threads ask ahead; or a transform that decodes them in "
                "the worker"
            )

    @staticmethod
    def _viewed(data: memoryview) -> torch.Tensor:
        return tensor_of(data)

    def _shared(self, shape: int | tuple[int, ...]) -> Any:
        found = shared_zeros(shape)
        if "_blocks" in self.__dict__:
            self._blocks.append(found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        if not self.allow_skipped:
            check_divided_once()  # a worker that is spawned can't see who has started it
        left = dict.fromkeys(("_spare", "_labels", "_lengths", "_whole", "_resumed_part"))
        # A copy has a transform of its own: validation is often given one so, by copy.copy.
        return self.__dict__ | left | {"_samplers": [], "_parts": None, "_decoded": copy.copy(self._decoded)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_parts": weakref.WeakValueDictionary()}
        share_again(*self._blocks)

    def __len__(self) -> int:
        """Number of samples of the whole dataset."""
        return self.num_samples

    def __getitems__(self, indices: Sequence[Position | int]) -> list[Any]:
        """One batch, by one request: what DataLoader calls.

        :param indices: positions of one epoch, as :class:`EpochSampler` and :class:`TraceSampler` yield them.

        Raises :class:`InvalidInput` when the samples are of several shapes, and the DataLoader has no ``collate_fn``
        of yours that takes them.
        """
        if not len(indices):
            return []
        if isinstance(indices, Position):  # taken for a batch of what it is made of
            iter(indices)
        if isinstance(indices[0], Position):
            samples = self._positions(indices)
        else:
            self._warn_once(
                "a batch of plain integers reads each sample on its own from the store, which is slow: give the "
                "DataLoader sampler=refill.EpochSampler(dataset), or refill.TraceSampler(dataset, your_sampler); where "
                "it reads a Subset, that in place of the dataset"
            )
            samples = self._plain(indices)
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
        process, before = self._read_alone
        self._read_alone = os.getpid(), (before if process == os.getpid() else 0) + 1
        if self._read_alone[1] > 1:  # one is a look
            self._warn_once(
                "samples are read one by one, dataset[i], each by a request of its own from the store, which is slow: "
                "iterate a DataLoader(dataset, batch_size=64, sampler=refill.EpochSampler(dataset))"
            )
        return self._plain([index])[0]

    def _plain(self, indices: Sequence[Any]) -> list[Any]:
        if not self.allow_skipped:
            check_divided_once()
        return self._exactly(indices)

    def _warn_once(self, text: str) -> None:
        """Once in each process, which the text names: a forked one has what Python remembers of those before."""
        if (os.getpid(), text) not in self._warned:
            self._warned.add((os.getpid(), text))
            warnings.warn(f"{text} (process {os.getpid()})", stacklevel=3)

    def samples_of(
        self,
        epoch: int,
        positions: Int64Array,
        iteration: int = 0,
        wanted: Int64Array | None = None,
        *,
        as_many: bool = False,
    ) -> list[Any]:
        """The samples that answer positions ``(n,)`` of this rank, by one request. Called by what reads this dataset.

        :param wanted: ``(n,)`` which samples, where the sampler names them; None: pods know the order.
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
        connection = self.connection
        if (others := self._others) is not None and isinstance(connection, PodConnection | PlannedConnection):
            others.look(connection)
        try:
            if isinstance(connection, DealtConnection):
                batch = connection.batch(epoch, positions, wanted)
            else:
                batch = connection.batch(epoch, positions, None if others is None else partial(others.look, connection))
        except EpochNotReady as error:
            raise _said_of_parts(error, self.job) from None
        except RankTaken as error:
            raise said_of_rank(error) from None
        if hole is not None and not self.allow_skipped:
            self._check_skipped(epoch, hole)
        return self._said_to_be_alike(self._answered(connection, epoch, positions, batch, as_many=as_many))

    def samples_for_rank(
        self, rank: int, epoch: int, positions: Int64Array, wanted: Int64Array | None = None
    ) -> list[Any]:
        """The samples that answer positions ``(n,)`` of another rank. Called where one process reads for all ranks, as
        in some trainers.

        They have no ``__key__``, because text can't be sent as tensors are.

        :param wanted: as that of :meth:`samples_of`.
        """
        connection = self.connection.of_rank(rank)
        if isinstance(connection, DealtConnection):
            batch = connection.batch(epoch, positions, wanted)
        else:
            batch = connection.batch(epoch, positions)
        return self._said_to_be_alike(
            self._answered(connection, epoch, positions, batch, with_keys=False, as_many=True)
        )

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

    @property
    def transform(self) -> Any:
        """The function that is called with each sample. Where ``as_tuple`` makes tuples, the one that was set here, as
        timm's ``create_loader`` does: it is called with the first item of each, the picture."""
        return self._decoded.transform_of_first if self._decoded.makes_tuples else self._decoded.transform

    @transform.setter
    def transform(self, function: Any) -> None:
        if self._decoded.makes_tuples:
            self._decoded.transform_of_first = function
        else:
            self._decoded.transform = function

    def where(
        self,
        mask: ArrayLike | None = None,
        *,
        classes: Sequence[int | str] | int | str | None = None,
        keys: Sequence[str] | str | None = None,
        lengths: tuple[int, int] | None = None,
        ids: ArrayLike | None = None,
        without: ArrayLike | None = None,
        split: str | None = None,
        splits: Mapping[str, float] | None = None,
        fraction: float | None = None,
        first: int | None = None,
        by: str = "id",
    ) -> torch.utils.data.Subset[Any]:
        """A part of the samples, to be given to :class:`EpochSampler` and the DataLoader: docs/PARTS.md. It has those
        for which all that is given holds. Nothing is read for it but the index.

        :param mask: ``(len(dataset),)`` true for samples that are wanted, by id: of :meth:`column`, or one of your own.
        :param classes: their labels, by number or by name.
        :param keys: patterns of their keys, ``"dog/*"``. The index needs a column ``__key__`` for it.
        :param lengths: ``(least, most)`` bytes in the store.
        :param ids: these samples; ``without``: all but these.
        :param split: the name of one of ``splits``, parts by name, ``{"train": 0.9, "test": 0.1}``: by a hash of the
            id, so that samples stay in their split when others are added behind them.
        :param fraction: a part of what is left, by a hash of the id: one of 0.01 lies in one of 0.1.
        :param first: so many of what is left, in the order of the dataset.
        :param by: ``"key"``: hashes are of the key, which a sample has wherever it lies; by the column ``__key__``.

        Raises :class:`InvalidInput` for what chooses no sample, and for what the dataset does not have.
        """
        self._check_parts()
        part = part_choice.Narrowed(len(self))
        if mask is not None:
            part.keep("mask", part_choice.of_mask(mask, len(self)))
        if ids is not None:
            part.keep("ids", np.isin(part.ids, part_choice.checked_ids("ids", ids, len(self))))
        if without is not None:
            left_out = part_choice.checked_ids("without", without, len(self))
            part.keep("without", np.isin(part.ids, left_out, invert=True))
        if classes is not None:
            if (labels := self.labels) is None:
                raise InvalidInput("the dataset has no labels: give mask, true or false for each sample")
            named = part_choice.labels_named(classes, self.classes, labels)
            part.keep(f"classes={classes!r:.100}", np.isin(labels[part.ids], named))
        if lengths is not None:
            part.keep(f"lengths={lengths!r:.100}", part_choice.of_lengths(self.lengths[part.ids], lengths))
        hashed = self._narrowed_by_keys(part, keys, by)
        if split is not None or splits is not None:
            part.keep(f"split={split!r:.100}", part_choice.in_split(hashed[part.ids], split, splits))
        if fraction is not None:
            part.keep(f"fraction={fraction!r:.100}", part_choice.in_fraction(hashed[part.ids], fraction))
        found = part.ids
        if first is not None:
            if type(first) is not int or first < 1:
                raise InvalidInput(f"first must be a number of samples, got {first!r:.100}")
            found = found[:first]
        return torch.utils.data.Subset(self, found.tolist())

    def _check_parts(self) -> None:
        """Raises :class:`InvalidInput` for what has none."""

    def _narrowed_by_keys(
        self, part: part_choice.Narrowed, patterns: Sequence[str] | str | None, by: str
    ) -> Int64Array | UInt64Array:
        """Returns what is hashed of each sample of the dataset."""
        if by not in ("id", "key"):
            raise InvalidInput(f"by must be 'id' or 'key', got {by!r:.50}")
        every = np.arange(len(self), dtype=np.int64)
        if patterns is None and by == "id":
            return every
        is_like, of_keys = part_choice.of_keys(self._column(KEYS)[0], patterns)
        if patterns is not None:
            part.keep(f"keys={patterns!r:.100}", is_like[part.ids])
        return of_keys if by == "key" else every

    def part(self, ids: Int64Array) -> CacheDataset:
        """The dataset that reads these samples alone, by a job of its own: the same for the same ids. Called by
        samplers of a torch Subset."""
        return self._whole.part(ids) if self._whole is not None else self._part(job_of_part(self.job, ids))

    def _part(self, job: str) -> CacheDataset:
        part = self._parts.get(job)
        if part is None:
            part = copy.copy(self)
            part._decoded = self._decoded  # what is set at the dataset later holds for its parts
            part._settings = self._settings | {"name": job, "order": "explicit"}
            resume = self._state_of_part
            part._resume = resume if resume is not None and resume.job == job else None
            part._begin()
            part._whole, part._made = self, self._made
            if job not in self._made:
                self._made.append(job)
            part._others = OtherParts(self._made) if part.world_size > 1 else None
            self._parts[job] = part
            if part._resume is not None:  # made anew, it would go back there
                self._resumed_part = part
        return part

    def end_job(self) -> None:
        """End the job on all pods, and those of its parts, and free their memory. It is enough that one rank calls
        it."""
        if self._whole is None:
            for job in self._made:
                self._part(job).end_job()
        super().end_job()

    def positions_begin(self, start: int, composed: int = 0) -> int:
        """Called by a sampler of this process when it hands out positions from ``start`` on. Returns a number for this
        iteration.

        :param composed: how many positions a batch has that the sampler composes; 0: it composes none.
        """
        return self._guard.begins(start, composed)

    def _positions(self, indices: Sequence[Any]) -> list[Any]:
        try:
            asked = np.array([each[:] for each in indices], dtype=np.int64).reshape(len(indices), len(Position._fields))
        except (TypeError, ValueError) as error:
            raise InvalidInput("a batch mixes positions and plain integers; use one sampler for it") from error
        epochs, positions, iterations, ranks, jobs, wanted = asked[asked[:, 1] >= 0].T
        if not len(epochs):
            return []
        if np.any((jobs != 0) & (jobs != self._job_number)):
            raise InvalidInput(
                f"the DataLoader reads job {self.job}, and its sampler is one of another job: make the sampler of what "
                "the DataLoader reads, the same dataset or Subset"
            )
        first, last = int(epochs.min()), int(epochs.max())
        if first != last:
            raise InvalidInput(f"a batch mixes epochs {first} and {last}; call set_epoch before iterating, not within")
        if ranks[0] < 0:
            return self.samples_of(first, np.ascontiguousarray(positions), int(iterations[0]), _named(wanted))
        samples: list[Any] = []
        for rank in dict.fromkeys(ranks.tolist()):
            of_rank = ranks == rank
            samples += self.samples_for_rank(
                rank, first, np.ascontiguousarray(positions[of_rank]), _named(wanted[of_rank])
            )
        return samples

    def _check_skipped(self, epoch: int, hole: Hole) -> None:
        """Whether pods, too, have never been asked for what is missing here: a loop may go on where another one ended,
        by skipping batches that were trained with."""
        if not self.left_out(epoch, hole.start, hole.end):
            return
        raise SamplesSkipped(
            f"rank {self.rank} of job {self.job} asks for a part of its positions only: in epoch {epoch} "
            f"it left out {hole.start} to {hole.end - 1} ({hole.pattern}), whose samples would be lost. Something "
            "divides them a second time, skips batches, or takes them in another order, as a batch sampler that "
            "shuffles or sorts a window of them (refill has shuffled: sort within a batch). Lightning and Accelerate: "
            "give the trainer "
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

    def _said_to_be_alike(self, samples: list[Any]) -> list[Any]:
        """Warns once of a batch that torch does not put together: its error would name neither sample nor remedy."""
        if (os.getpid(), "members") not in self._warned and (why := why_not_alike(samples)) is not None:
            self._warned.add((os.getpid(), "members"))
            warnings.warn(
                f"{why}. torch's default collate_fn fails on that with a KeyError: transform=function of CacheDataset "
                "can give them the same names, or use a collate_fn of your own that takes both",
                stacklevel=2,
            )
        return samples


def _named(wanted: Int64Array) -> Int64Array | None:
    """Which samples positions ask for; None: pods know."""
    return np.ascontiguousarray(wanted) if wanted[0] >= 0 else None


def _said_of_parts(error: EpochNotReady, job: str) -> EpochNotReady:
    """The error, with what else may be wrong where a part waits for other ranks: they may be ranks of other parts."""
    if whole_of(job) is None:
        return error
    return EpochNotReady(
        f"{error}. Do all ranks make the same parts? Give random_split a generator with a seed", **error.details
    )
