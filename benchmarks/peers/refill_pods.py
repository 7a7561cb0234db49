"""refill: what do two pods get whose memory together is the allowance?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.utils.data
from peers.batches import Batch, Epochs, collate
from peers.setting import BUCKET, Setting

import refill


def open_planned(setting: Setting) -> Epochs:
    return _open(setting)


def open_planned_large_chunks(setting: Setting) -> Epochs:
    return _open(setting, chunk_size=32)


def open_redox(setting: Setting) -> Epochs:
    return _open(setting, policy="redox", chunk_size=64)


def _open(setting: Setting, **of_job: Any) -> Epochs:
    dataset = refill.CacheDataset(
        setting.pod_urls[0],
        dataset=f"s3://{BUCKET}/blobs",
        job="peers",
        num_epochs=setting.epochs,
        **of_job,
    )
    sampler = refill.EpochSampler(dataset)
    loader = torch.utils.data.DataLoader(
        dataset,
        setting.batch_size,
        sampler=sampler,
        num_workers=setting.workers,
        persistent_workers=True,
        collate_fn=_collate_samples,
    )

    def epoch_of(epoch: int) -> Iterable[Batch]:
        sampler.set_epoch(epoch)
        return loader

    return epoch_of


def _collate_samples(samples: list[dict[str, bytes]]) -> Batch:
    return collate([sample["jpg"] for sample in samples])
