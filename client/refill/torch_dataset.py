"""How does a batch reach the training loop? The data path of the client, from top to bottom."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed
import torch.utils.data

from refill.decoders import Decode, decode_member, make_decode
from refill.epoch_sampler import Position
from refill.errors import InvalidInput
from refill.pod_connection import PodConnection, ReceivedBatch
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import Int64Array
from refill.tar_samples import parse_members

__all__ = ["CacheDataset", "SampleDecoder"]


class SampleDecoder:
    """Raw tar ranges -> samples: ``{"__key__": str, "__id__": int, extension: value, ...}``, then ``transform``."""

    def __init__(self, decode: Decode, transform: Callable[[dict[str, Any]], Any] | None) -> None:
        self._decode = make_decode(decode)
        self._transform = transform

    def __call__(self, batch: ReceivedBatch) -> list[Any]:
        samples = []
        for sample_id, payload in zip(batch.sample_ids.tolist(), batch.payloads, strict=True):
            key, members = parse_members(payload, sample_id)
            sample: dict[str, Any] = {"__key__": key, "__id__": sample_id}
            for extension, view in members.items():
                # A copy: one sample kept by the caller must not keep the whole batch's buffer.
                data = bytes(view)
                sample[extension] = (
                    data if self._decode is None else decode_member(self._decode, extension, data, sample_id, key)
                )
            samples.append(sample if self._transform is None else self._transform(sample))
        return samples


class CacheDataset(torch.utils.data.Dataset[Any]):
    """A map-style dataset read through refill, one request for each batch.

    Use it with :class:`EpochSampler` (or :class:`TraceSampler` around a sampler of your own) in any DataLoader:
    workers forked or spawned, persistent or not. A plain integer index works too and returns exactly that sample,
    by a read of its own: right for a look, slow for training.

    :param service_url: the service or any pod, ``http://refill:8000``.
    :param dataset: URL of the dataset as the pods reach it, ``s3://bucket/prefix``.
    :param job: name of the training run; all its ranks give the same, another run another one.
    :param rank, world_size: default to torch.distributed's, else to RANK and WORLD_SIZE, else to 0 of 1.
    :param decode: None leaves members as bytes; True decodes by extension; see :data:`refill.decoders.Decode`.
    :param transform: called with each sample.
    :param home: URL of the pod to ask; None: the rank's number picks one.
    :param timeout_seconds: how long to wait for pods that do not answer before the epoch fails.
    :param settings: further settings of :class:`refill.protocol.job_spec.JobSpec`, such as ``chunk_size``.

    Nothing is asked of the pods before the first use. Errors are of :mod:`refill.errors`.
    """

    def __init__(
        self,
        service_url: str,
        *,
        dataset: str,
        job: str,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        decode: Decode = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        home: str | None = None,
        timeout_seconds: float = 300.0,
        **settings: Any,
    ) -> None:
        default_rank, default_world_size = _place_in_world()
        self._settings: dict[str, Any] = settings | {
            "name": job,
            "dataset": dataset,
            "world_size": default_world_size if world_size is None else world_size,
            "seed": seed,
            "shuffle": shuffle,
            "drop_last": drop_last,
        }
        self.rank = default_rank if rank is None else rank
        self._service_url = service_url
        self._home = home
        self._timeout_seconds = timeout_seconds
        self._decoded = SampleDecoder(decode, transform)
        self._connection: PodConnection | None = None
        self._new_connection()  # a wrong URL or setting fails here, not at the first batch

    def __len__(self) -> int:
        """Samples of the whole dataset."""
        return int(self.connection.info()["num_samples"])

    def __getitems__(self, indices: Sequence[Position | int]) -> list[Any]:
        """One batch, by one request: what DataLoader calls."""
        if indices and isinstance(indices[0], Position):
            return self._positions(indices)  # type: ignore[arg-type]
        warnings.warn(
            "a batch of plain integers reads each sample on its own, by a request to the store: "
            "give the DataLoader sampler=refill.EpochSampler(dataset), or TraceSampler(dataset, your_sampler)",
            stacklevel=2,
        )
        return self._decoded(self.connection.samples(np.array(indices, dtype=np.int64)))

    def __getitem__(self, index: Position | int) -> Any:
        """One sample: of a position, or exactly the one with this id."""
        if isinstance(index, Position):
            return self._positions([index])[0]
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no sample {index}; the dataset has samples 0 to {len(self) - 1}")
        return self._decoded(self.connection.samples(np.array([index % len(self)], dtype=np.int64)))[0]

    @property
    def samples_per_rank(self) -> int:
        """Positions of each rank in an epoch of a job with order 'keyed'."""
        return int(self.connection.info()["samples_per_rank"])

    @property
    def metadata(self) -> dict[str, Any]:
        """What `refill pack` wrote down, such as ``classes``."""
        return dict(self.connection.info()["metadata"])

    @property
    def connection(self) -> PodConnection:
        """The connection of this process; the job's settings are fixed from here on."""
        if self._connection is None:
            self._connection = self._new_connection()
            self._connection.info()
        return self._connection

    def configure(self, **settings: Any) -> None:
        """Set job settings or ``rank`` before the first use, None leaves one as it is; later only the same values."""
        for name, value in settings.items():
            if value is None:
                continue
            known = self.rank if name == "rank" else self._settings.get(name, _DEFAULTS.get(name))
            if self._connection is not None and known != value:
                raise InvalidInput(
                    f"{name} is {known!r} for job {self._settings['name']}, which is registered already: "
                    f"give {name}={value!r} to CacheDataset, or make the sampler before the first use of the dataset"
                )
            if name == "rank":
                self.rank = int(value)
            else:
                self._settings[name] = value
        self._new_connection()

    def epoch_counts(self, epoch: int) -> dict[str, Any]:
        """What the pods counted in an epoch: ``{"total": {...}, "pods": [...]}``."""
        return self.connection.epoch_counts(epoch)

    def end_job(self) -> None:
        """End the job on all pods and free its memory; one rank's call is enough."""
        self.connection.end_job()

    def samples_of(self, epoch: int, positions: Int64Array) -> list[Any]:
        """The samples that answer positions ``(n,)`` of this rank, by one request."""
        return self._decoded(self.connection.batch(epoch, positions))

    def _positions(self, indices: Sequence[Position]) -> list[Any]:
        epochs = {index.epoch for index in indices}
        if len(epochs) > 1:
            raise InvalidInput(f"a batch mixes epochs {sorted(epochs)}; call set_epoch before iterating, not within")
        return self.samples_of(epochs.pop(), np.array([index.position for index in indices], dtype=np.int64))

    def _new_connection(self) -> PodConnection:
        spec = JobSpec.from_dict(self._settings)
        if not 0 <= self.rank < spec.world_size:
            raise InvalidInput(f"rank {self.rank} is not one of the {spec.world_size} ranks of world_size")
        return PodConnection(self._service_url, spec, self.rank, self._home, self._timeout_seconds)


_DEFAULTS: Mapping[str, Any] = JobSpec(name="defaults", dataset="defaults").to_dict()


def _place_in_world() -> tuple[int, int]:
    """``(rank, world size)`` as the training launcher has set them."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
