"""How does a loop read several datasets in proportions? A dataset of PyTorch's whose samples are of all of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from refill.errors import InvalidInput
from refill.formats.asked_members import AskedMembers
from refill.formats.decoders import Decode
from refill.formats.sample_decoder import SampleDecoder, Transform
from refill.pods.index_reads import labels_in
from refill.pods.mixture_connection import Mixed, MixtureConnection
from refill.pods.planned_connection import PlannedConnection
from refill.pods.planned_place import DealtConnection, RankPlace
from refill.pods.pod_connection import PodConnection
from refill.pods.received_batch import ReceivedBatch
from refill.protocol.column_values import LABELS
from refill.protocol.job_spec import JobSpec
from refill.protocol.mixture_order import BLOCK
from refill.protocol.mixture_weights import MixtureWeights
from refill.protocol.wire_format import Int64Array
from refill.torch_dataset import CacheDataset

__all__ = ["Mixture"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MOST = 512
"""Datasets."""


class Mixture(CacheDataset):
    """Several datasets in one loop, each in its proportion. It takes the place of a :class:`CacheDataset`, with the
    same arguments: docs/MIXTURES.md.

        mixture = refill.Mixture("http://refill:8000", {"web": "s3://b/web", "code": "s3://b/code"}, job="run-1",
                                 weights={"web": 0.8, "code": 0.2})
        loader = DataLoader(mixture, batch_size=256, sampler=refill.EpochSampler(mixture), num_workers=4)

    A sample has ``__dataset__``, the name of its dataset, beside ``__id__`` and ``__key__``, which are those of that
    dataset. Each dataset is read by a job of its own, ``run-1.web``, with receipts of its own. An epoch of that job is
    a *pass*: each sample of the dataset once. The next epoch of the mixture goes on in the pass where the last one
    ended, unless too few samples are left in it; so no sample comes more often in an epoch than its repeats, rounded
    up.

    Counts are as those of MosaicML's streaming. Of ``weights`` on one hand, ``repeat`` and ``choose`` on the other, one
    is given; without any, all samples come once.

    :param datasets: URLs of datasets as pods reach them, by names of letters, digits, ``_`` and ``-``. Formats and
        stores may differ.
    :param weights: of the datasets, by name: its part of the epoch. Or such weights by the epoch from which on they
        hold, ``{0: {...}, 10: {...}}``. A dataset that is not named has none.
    :param repeat: how often samples of a dataset come in an epoch, by name: 2, 0.5.
    :param choose: how many samples of a dataset an epoch has, by name.
    :param epoch_size: samples of an epoch with weights. None: as many as all datasets have.
    :param stratified: in how many positions in a row each dataset has its part, to one sample: the DataLoader's
        batch_size has it so in each batch. None: in 256.
    :param memory_bytes: memory of all its jobs on each pod, which is divided among them by what comes of each. None: as
        much as one job may keep for itself.

    With the state of an epoch's end, weights and datasets may change: those that were there go on where they stand, a
    new one begins at its beginning.
    """

    _called = "Mixture"

    def __init__(
        self,
        service_url: str,
        datasets: Mapping[str, str],
        *,
        job: str,
        weights: Mapping[str, float] | Mapping[int, Mapping[str, float]] | None = None,
        repeat: Mapping[str, float] | None = None,
        choose: Mapping[str, int] | None = None,
        epoch_size: int | None = None,
        stratified: int | None = None,
        decode: Decode = None,
        transform: Transform | None = None,
        as_tuple: Sequence[str] | None = None,
        **arguments: Any,
    ) -> None:
        if not isinstance(datasets, Mapping) or not 1 <= len(datasets) <= _MOST:
            raise InvalidInput(f"datasets must be 1 to {_MOST} URLs by names, got {datasets!r:.100}")
        for name, url in datasets.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise InvalidInput(f"a dataset's name has letters, digits, '_' and '-', 64 at most, got {name!r:.80}")
            if not isinstance(url, str):
                raise InvalidInput(f"dataset {name} must be a URL, got {url!r:.80}")
        if stratified is not None and (type(stratified) is not int or not 1 <= stratified <= 1 << 16):
            raise InvalidInput(f"stratified must be a number of positions, 1 to {1 << 16}, got {stratified!r}")
        if "dataset" in arguments:
            raise InvalidInput("a Mixture has datasets, by their names, and no argument dataset")
        found = MixtureWeights.of(list(datasets), weights, repeat, choose, epoch_size)
        self._mixed = Mixed(dict(datasets), found, stratified or BLOCK)
        super().__init__(service_url, dataset="mixture", job=job, **arguments)
        self._asked = AskedMembers(decode, self._cut, self._shared)
        decoders = [
            SampleDecoder(
                decode,
                transform,
                as_tuple,
                {"__dataset__": name},
                cut=self._cut,
                viewed=self._viewed,
                asked=self._asked,
            )
            for name in datasets
        ]
        self._decoded: Any = _MixtureDecoder(decoders)

    def _share(self) -> None:
        super()._share()
        count = len(self._mixed.datasets)
        rows = self._shared((count, RankPlace.NUM_SHARED))
        self._member_places = [RankPlace(rows[row]) for row in range(count)]
        self._base = self._shared(1 + 2 * count)

    @property
    def connection(self) -> MixtureConnection:
        found = super().connection
        assert isinstance(found, MixtureConnection)
        return found

    @property
    def names(self) -> list[str]:
        """Of the datasets, in their order."""
        return list(self._mixed.datasets)

    def jobs(self) -> dict[str, str]:
        """The name of each dataset's job, for receipts, metrics and ``refill top``."""
        return {name: f"{self.job}.{name}" for name in self._mixed.datasets}

    def counts(self, epoch: int) -> dict[str, int]:
        """How many samples an epoch has of each dataset."""
        return dict(zip(self.names, self.connection.counts(epoch), strict=True))

    def passes(self, epoch: int) -> dict[str, list[int]]:
        """Of each dataset the passes that an epoch has samples of: epochs of its job, for receipts."""
        return dict(zip(self.names, self.connection.passes(epoch), strict=True))

    def samples_at(self, epoch: int, positions: Int64Array) -> dict[int, Any]:
        """The samples at positions ``(n,)`` of an epoch's one order, by these, but for damaged ones that the run goes
        on without. Called by what packs them."""
        connection = self.connection
        batch = connection.at(epoch, positions)
        self._know_format(connection)
        self._check_views()
        samples, damaged = self._intact(batch)
        if damaged and not self._skips_damaged:
            raise next(iter(damaged.values()))
        if damaged:
            places, why = list(damaged), list(damaged.values())
            connection.goes_without_at(epoch, positions[places], batch.sample_ids[places], why)
        return {int(positions[place]): sample for place, sample in samples.items()}

    def part(self, ids: Int64Array) -> NoReturn:
        """There is none."""
        self._check_parts()

    def _check_parts(self) -> NoReturn:
        raise InvalidInput(
            "a Mixture has no parts: pack a part as a dataset of its own, or say by choose how many of each come"
        )

    def configure(self, **settings: Any) -> None:
        """As that of :class:`CacheDataset`."""
        if settings.get("order") == "explicit":
            raise InvalidInput("a Mixture has an order of its own: EpochSampler reads it, or CacheIterableDataset")
        super().configure(**settings)

    def _new_connection(self) -> MixtureConnection:
        return self._mixture_connection(*self._spec_and_rank())

    def _mixture_connection(self, spec: JobSpec, rank: int) -> MixtureConnection:
        return MixtureConnection(
            self._service_url,
            spec,
            rank,
            self._home,
            self._timeout_seconds,
            self._credentials,
            self._connect_timeout_seconds,
            self._mixed,
            goes_without_damaged=self._skips_damaged,
            place=self._place,
            member_places=self._member_places,
            base=self._base,
            groups=self._groups,
            cut=self._cut,
        )

    def _know_format(self, connection: PodConnection | DealtConnection) -> None:
        if not self._decoded.knows_dataset:
            assert isinstance(connection, MixtureConnection)
            self._decoded.datasets_are(connection)
            self._asked.begin(connection.num_samples() // connection.spec.world_size)


class _MixtureDecoder:
    """A decoder for each dataset, whose format may be another one."""

    def __init__(self, decoders: list[SampleDecoder]) -> None:
        self._decoders = decoders
        self._first_ids: Int64Array | None = None

    def __copy__(self) -> _MixtureDecoder:
        return _MixtureDecoder([copy.copy(decoder) for decoder in self._decoders])

    @property
    def knows_dataset(self) -> bool:
        return all(decoder.knows_dataset for decoder in self._decoders)

    @property
    def gives_views(self) -> bool:
        return self._decoders[0].gives_views

    @property
    def makes_tuples(self) -> bool:
        return self._decoders[0].makes_tuples

    @property
    def transform(self) -> Any:
        return self._decoders[0].transform

    @transform.setter
    def transform(self, function: Any) -> None:
        for decoder in self._decoders:
            decoder.transform = function

    @property
    def transform_of_first(self) -> Any:
        return self._decoders[0].transform_of_first

    @transform_of_first.setter
    def transform_of_first(self, function: Any) -> None:
        for decoder in self._decoders:
            decoder.transform_of_first = function

    def datasets_are(self, connection: MixtureConnection) -> None:
        """Fact: what the indexes of the datasets say."""
        self._first_ids = connection.first_ids
        for decoder, member, size in zip(self._decoders, connection.members, connection.sizes, strict=True):

            def labels(member: PlannedConnection = member, size: int = size) -> Int64Array:
                return labels_in(member.column(LABELS, size), member.home)

            decoder.dataset_is(member.info().get("metadata", {}), labels)

    def __call__(self, batch: ReceivedBatch, place: int, with_keys: bool = True) -> Any:
        """As that of :class:`SampleDecoder`, of the dataset that the sample is of."""
        assert self._first_ids is not None
        sample_id = batch.sample_ids[place]
        number = int(self._first_ids[1:].searchsorted(sample_id, side="right"))
        damaged = {0: batch.damaged[place]} if place in batch.damaged else None
        ids = batch.sample_ids[place : place + 1] - self._first_ids[number]
        return self._decoders[number](ReceivedBatch(ids, [batch.payloads[place]], damaged), 0, with_keys)
