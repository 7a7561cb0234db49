"""WebDataset: what do tars get, streamed whole, with a shuffle buffer as large as the allowance?"""

from __future__ import annotations

import boto3
import webdataset
from peers.batches import Epochs, collate
from peers.setting import BUCKET, Setting


def open_loader(setting: Setting) -> Epochs:
    return _loader(setting, "tars/")


def open_large(setting: Setting) -> Epochs:
    return _loader(setting, "blobs/")


def _loader(setting: Setting, prefix: str) -> Epochs:
    listed = boto3.client("s3").list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]
    urls = [f"{setting.store_url}/{BUCKET}/{found['Key']}" for found in listed if found["Key"].endswith(".tar")]
    dataset = (
        webdataset.WebDataset(urls, shardshuffle=len(urls))
        .shuffle(setting.allowance_samples // setting.workers)
        .map(_content)
        .batched(setting.batch_size, collation_fn=collate, partial=True)
    )
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=setting.workers, persistent_workers=True)
    return lambda epoch: loader


def _content(sample: dict[str, bytes]) -> bytes:
    return sample["jpg"]
