"""refill: samples for training from an object store, each exactly once an epoch.

    dataset = refill.CacheDataset("http://refill:8000", dataset="s3://bucket/images", job="run-1", decode=True)
    sampler = refill.EpochSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, batch_size=256, sampler=sampler, num_workers=4)
    loader = refill.timed(loader, dataset)  # optional: measures waiting, and has a state for checkpoints

Names load what they need when they are first used: ``import refill`` alone needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from refill.errors import RefillError

if TYPE_CHECKING:
    from refill.class_samplers import BucketSampler, ClassBalancedSampler, ClassSampler, CurriculumSampler
    from refill.data_wait import timed
    from refill.epoch_reader import EpochReader, iterate
    from refill.epoch_sampler import EpochSampler, TraceSampler
    from refill.formats.decoders import as_view
    from refill.grain_source import GrainSource
    from refill.importance_sampler import ImportanceSampler
    from refill.iterable_dataset import CacheIterableDataset
    from refill.loops.position import Position
    from refill.mixture import Mixture
    from refill.packed_sequences import PackedSequences
    from refill.packing import pack
    from refill.stretch_shards import huggingface_stream
    from refill.token_batches import MegatronBatches, TitanBatches
    from refill.torch_dataset import CacheDataset

__version__ = "0.1.0"
__all__ = [
    "BucketSampler",
    "CacheDataset",
    "CacheIterableDataset",
    "ClassBalancedSampler",
    "ClassSampler",
    "CurriculumSampler",
    "EpochReader",
    "EpochSampler",
    "GrainSource",
    "ImportanceSampler",
    "MegatronBatches",
    "Mixture",
    "PackedSequences",
    "Position",
    "RefillError",
    "TitanBatches",
    "TraceSampler",
    "as_view",
    "huggingface_stream",
    "iterate",
    "pack",
    "timed",
]

_HOMES = {
    "BucketSampler": "refill.class_samplers",
    "ClassBalancedSampler": "refill.class_samplers",
    "ClassSampler": "refill.class_samplers",
    "CurriculumSampler": "refill.class_samplers",
    "CacheDataset": "refill.torch_dataset",
    "CacheIterableDataset": "refill.iterable_dataset",
    "EpochReader": "refill.epoch_reader",
    "EpochSampler": "refill.epoch_sampler",
    "GrainSource": "refill.grain_source",
    "ImportanceSampler": "refill.importance_sampler",
    "MegatronBatches": "refill.token_batches",
    "Mixture": "refill.mixture",
    "PackedSequences": "refill.packed_sequences",
    "Position": "refill.loops.position",
    "TitanBatches": "refill.token_batches",
    "TraceSampler": "refill.epoch_sampler",
    "as_view": "refill.formats.decoders",
    "huggingface_stream": "refill.stretch_shards",
    "iterate": "refill.epoch_reader",
    "pack": "refill.packing",
    "timed": "refill.data_wait",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'refill' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"refill.{name} needs PyTorch: pip install 'refill-cache[torch]'", name="torch"
        ) from None
