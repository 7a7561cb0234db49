"""s3torchconnector: what does Amazon's map-style dataset get? Random access, an object a sample."""

from __future__ import annotations

import torch.utils.data
from peers.batches import Epochs, collate
from peers.setting import BUCKET, Setting
from s3torchconnector import S3ClientConfig, S3MapDataset, S3Reader


def _read(reader: S3Reader) -> bytes:
    content: bytes = reader.read()
    return content


def open_loader(setting: Setting) -> Epochs:
    dataset = S3MapDataset.from_prefix(
        f"s3://{BUCKET}/objects/",
        region="us-east-1",
        endpoint=setting.store_url,
        transform=_read,
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    loader = torch.utils.data.DataLoader(
        dataset,
        setting.batch_size,
        shuffle=True,
        num_workers=setting.workers,
        persistent_workers=True,
        collate_fn=collate,
    )
    return lambda epoch: loader
