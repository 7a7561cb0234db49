"""How does DLIO, the benchmark behind MLPerf Storage, read through refill? By a data loader that its settings name.

    framework: pytorch
    reader: {data_loader: pytorch, data_loader_classname: refill.dlio.RefillDataLoader, data_loader_sampler: index}
    storage:
      storage_type: local_fs
      storage_options: {refill_url: http://refill:8000, refill_dataset: s3://bucket/images, refill_job: run-1}

Each process of DLIO is a rank of that job, and its first epoch is the job's epoch 0. Imported by DLIO alone, which has
to be installed: https://github.com/argonne-lcf/dlio_benchmark, docs/DLIO.md.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from dlio_benchmark.common.enumerations import DataLoaderType, DatasetType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
from dlio_benchmark.utils.utility import sleep
from PIL import Image
from torch.utils.data import DataLoader

from refill.epoch_sampler import EpochSampler
from refill.errors import InvalidInput
from refill.torch_dataset import CacheDataset

__all__ = ["RefillDataLoader"]

_PREFIX = "refill_"
_NEEDED = ("url", "dataset", "job")


class RefillDataLoader(BaseDataLoader):  # type: ignore[misc]
    """DLIO's loader of torch, with samples from the pods in place of files.

    ``storage_options`` names the service, the dataset and the job, as ``refill_url``, ``refill_dataset`` and
    ``refill_job``; further settings of the job begin with ``refill_``, too. ``data_folder`` needs no data: DLIO lists
    it, so it has as many files as ``num_files_train`` says, which may be empty. Batch, workers, prefetching and what is
    done with a sample are as DLIO has them for its own loader: it is decoded, ``preprocess_time`` passes, and a tensor
    of the resized shape goes to the loop. The order is the job's: DLIO's ``seed`` and shuffling mean nothing to it.

    :raises InvalidInput: where an option is missing; for evaluation; and unless DLIO trains with each sample of the
        dataset once an epoch, in whole steps of all processes: else a receipt could not be exact.
    """

    def __init__(self, format_type: Any, dataset_type: Any, epoch_number: int) -> None:
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.PYTORCH)
        self._next_epoch = 0

    def read(self) -> None:
        """Called once, before the first epoch."""
        if self.dataset_type is not DatasetType.TRAIN:
            raise InvalidInput("refill.dlio reads for training alone: set workload.workflow.evaluation to False")
        args = self._args
        job = _job_of(args.storage_options)
        dataset = CacheDataset(
            job.pop("url"),
            rank=args.my_rank,
            world_size=args.comm_size,
            num_epochs=args.epochs,
            transform=_AsDlio(args.resized_image, args.preprocess_time, _decoder_of(self.format_type)),
            **job,
        )
        self._check_counts(len(dataset))
        self._sampler = EpochSampler(dataset)
        workers: dict[str, Any] = {}
        if args.read_threads:
            workers = {
                "multiprocessing_context": args.multiprocessing_context,
                "prefetch_factor": max(1, -(-args.prefetch_size // args.read_threads)) if args.prefetch_size else 2,
                "persistent_workers": True,
            }
        self._loader = DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=self._sampler,
            num_workers=args.read_threads,
            pin_memory=args.pin_memory,
            **workers,
        )

    def next(self) -> Iterator[Any]:
        """The batches of this rank's next epoch."""
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        self._sampler.set_epoch(epoch)
        yield from self._loader

    def finalize(self) -> None:
        """Called after each epoch; the loader goes on with the next one."""

    def _check_counts(self, num_samples: int) -> None:
        if self._args.total_training_steps > 0:
            raise InvalidInput("total_training_steps ends an epoch before all of its samples have come: leave it out")
        step = self.batch_size * self._args.comm_size
        if self.num_samples != num_samples or num_samples % step:
            raise InvalidInput(
                f"DLIO trains with {self.num_samples} samples, in steps of {step}, and the dataset has {num_samples}: "
                "num_files_train times num_samples_per_file has to be that many, in whole steps"
            )


class _AsDlio:
    """A sample -> what DLIO's own readers return for it, after the same work."""

    def __init__(
        self, returned: Any, preprocess_time: Any, decode: tuple[tuple[str, ...], Callable[[Any], Any]]
    ) -> None:
        self._returned, self._preprocess_time = returned, preprocess_time
        self._extensions, self._decode = decode

    def __call__(self, sample: dict[str, Any]) -> Any:
        for extension in self._extensions:
            if extension in sample:
                self._decode(sample[extension])
                sleep(self._preprocess_time)
                return self._returned
        raise InvalidInput(f"sample {sample['__key__']!r} has no member {' or '.join(self._extensions)}")


def _job_of(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of a dataset."""
    named = {str(name): value for name, value in (options or {}).items()}
    job = {name.removeprefix(_PREFIX): value for name, value in named.items() if name.startswith(_PREFIX)}
    if missing := [f"{_PREFIX}{name}" for name in _NEEDED if not job.get(name)]:
        raise InvalidInput(f"workload.storage.storage_options lacks {', '.join(missing)}")
    return job


def _decoder_of(format_type: Any) -> tuple[tuple[str, ...], Callable[[Any], Any]]:
    """Extensions of such a member, and what reads it. No pickles are loaded."""
    name = format_type.value
    if name not in _DECODERS:
        raise InvalidInput(f"refill.dlio reads {', '.join(_DECODERS)}, not {name}: set workload.dataset.format")
    return _DECODERS[name]


def _image(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)))


def _npy(data: bytes) -> Any:
    return np.load(io.BytesIO(data))


def _npz(data: bytes) -> Any:
    return _npy(data)["x"]


_DECODERS: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "jpeg": (("jpeg", "jpg"), _image),
    "png": (("png",), _image),
    "npy": (("npy",), _npy),
    "npz": (("npz",), _npz),
}
