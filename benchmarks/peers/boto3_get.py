"""boto3: what does a DataLoader get that reads each sample with one GET? And with 16 GETs at once in each worker?"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import botocore.config
import torch.utils.data
from peers.batches import Epochs, collate
from peers.setting import BUCKET, Setting

THREADS = 16


class OneGet(torch.utils.data.Dataset[bytes]):
    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._client: Any = None

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> bytes:
        if self._client is None:  # in the worker: clients don't survive a fork
            self._client = boto3.client("s3", config=botocore.config.Config(max_pool_connections=THREADS))
        body: bytes = self._client.get_object(Bucket=BUCKET, Key=f"objects/{number:08}.jpg")["Body"].read()
        return body


class ManyGets(OneGet):
    _threads: ThreadPoolExecutor | None = None

    def __getitems__(self, numbers: list[int]) -> list[bytes]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS)
        first, *rest = numbers
        return [self[first], *self._threads.map(self.__getitem__, rest)]


def open_loader(setting: Setting) -> Epochs:
    return _loader(setting, OneGet(setting.samples))


def open_threads(setting: Setting) -> Epochs:
    return _loader(setting, ManyGets(setting.samples))


def _loader(setting: Setting, dataset: OneGet) -> Epochs:
    loader = torch.utils.data.DataLoader(
        dataset,
        setting.batch_size,
        shuffle=True,
        num_workers=setting.workers,
        persistent_workers=True,
        collate_fn=collate,
    )
    return lambda epoch: loader
