"""Which samples do chaos runs deliver? A small dataset in an S3 store, of which every byte is known here."""

from __future__ import annotations

import asyncio
import random
import tempfile
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import numpy as np

from refill.protocol.wire_format import Int64Array
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.pack import pack

__all__ = ["PLANNED_SAMPLES", "ChaosDataset", "ChaosMixture", "dataset_in_s3", "mixture_in_s3"]

NUM_SAMPLES = 960
"""Two and three ranks divide it without a rest, so that no position repeats a sample."""
PLANNED_SAMPLES = 957
"""Of planned jobs, whose ranks need not: what repeats, or is left out, is known."""
_MIXED = {"web": 517, "code": 182, "books": 61}
"""Samples of the datasets of a mixture."""
_MIXTURES: list[dict[str, Any]] = [
    {"weights": {"web": 0.6, "code": 0.4}, "epoch_size": 667},
    {"repeat": {"code": 1.5, "books": 0.5}},
    {"weights": {0: {"web": 0.5, "books": 0.3, "code": 0.2}, 1: {"web": 0.3, "code": 0.7}}, "epoch_size": 400},
]
"""What a seed may have of them. All epochs have as many samples."""
_MOST_BYTES = 4000


@dataclass(frozen=True)
class ChaosDataset:
    url: str
    environment: Mapping[str, str]
    """By which the store is reached."""
    checksums: list[int]
    """crc32 of the bytes of each sample, by its id."""
    lengths: Int64Array
    """Bytes of each."""
    first_sample: Int64Array
    """``(blobs + 1,)``."""

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_positions(self) -> int:
        """Of an epoch."""
        return len(self.checksums)

    @property
    def endpoint(self) -> str:
        return self.environment["AWS_ENDPOINT_URL"]

    def replaced(self) -> ChaosDataset:
        """Put another one in its place."""
        bucket = self.url.rpartition("/")[2]
        return _put_dataset(self.environment, bucket, len(self.checksums), _MOST_BYTES, 2)


@dataclass(frozen=True)
class ChaosMixture:
    """Takes the place of a dataset. Its samples are numbered through all of its datasets."""

    datasets: Mapping[str, ChaosDataset]
    how: Mapping[str, Any]
    """Arguments of :class:`refill.Mixture`: weights, or repeats."""

    @classmethod
    def of_seed(cls, datasets: Mapping[str, ChaosDataset], seed: int) -> ChaosMixture:
        return cls(datasets, _MIXTURES[seed % len(_MIXTURES)])

    @property
    def _first(self) -> ChaosDataset:
        return next(iter(self.datasets.values()))

    @property
    def url(self) -> str:
        """Of the one that is replaced."""
        return self._first.url

    @property
    def environment(self) -> Mapping[str, str]:
        return self._first.environment

    @property
    def endpoint(self) -> str:
        return self._first.endpoint

    @property
    def checksums(self) -> list[int]:
        return [each for dataset in self.datasets.values() for each in dataset.checksums]

    @property
    def num_positions(self) -> int:
        if "epoch_size" in self.how:
            return int(self.how["epoch_size"])
        return sum(int(len(each.checksums) * self.how["repeat"].get(of, 1)) for of, each in self.datasets.items())

    def replaced(self) -> ChaosMixture:
        """Put another dataset in place of the first one."""
        name = next(iter(self.datasets))
        return ChaosMixture({**self.datasets, name: self._first.replaced()}, self.how)


def dataset_in_s3(
    environment: Mapping[str, str], *, num_samples: int = NUM_SAMPLES, most_bytes: int = _MOST_BYTES, seed: int = 1
) -> ChaosDataset:
    """Packs files of 100 to ``most_bytes`` bytes and copies the dataset into a bucket of its own."""
    bucket = f"chaos-{uuid.uuid4().hex[:12]}"
    _client(environment).create_bucket(Bucket=bucket)
    return _put_dataset(environment, bucket, num_samples, most_bytes, seed)


def mixture_in_s3(environment: Mapping[str, str]) -> dict[str, ChaosDataset]:
    """Those that mixtures are made of, by their names."""
    return {name: dataset_in_s3(environment, num_samples=size, seed=size) for name, size in _MIXED.items()}


def _put_dataset(
    environment: Mapping[str, str], bucket: str, num_samples: int, most_bytes: int, seed: int
) -> ChaosDataset:
    """Into a bucket, in place of the one that is there, if one is."""
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="refill-chaos-") as folder:
        files, store = Path(folder) / "files", Path(folder) / "store"
        files.mkdir()
        for number in range(num_samples):
            content = generator.randbytes(generator.randint(100, most_bytes))
            (files / f"sample{number:06}.bin").write_bytes(content)
        asyncio.run(pack(str(files), store.as_uri(), blob_bytes=75 * most_bytes))
        client = _client(environment)
        for path in store.rglob("*"):
            if path.is_file():
                client.put_object(Bucket=bucket, Key=path.relative_to(store).as_posix(), Body=path.read_bytes())
        return asyncio.run(_known(store, f"s3://{bucket}", environment))


async def _known(store: Path, url: str, environment: Mapping[str, str]) -> ChaosDataset:
    dataset = await Dataset.open(store.as_uri())
    records = await dataset.load_records(0, dataset.num_samples)
    blobs = {name: (store / name).read_bytes() for name in dataset.blobs.names}
    samples = []
    for sample in range(dataset.num_samples):
        first, length = int(records.offset[sample]), int(records.length[sample])
        samples.append(blobs[dataset.blobs.names[dataset.blobs.blob_of(sample)]][first : first + length])
    first_sample = dataset.blobs.first_sample
    await dataset.close()
    lengths = np.array(list(map(len, samples)), dtype=np.int64)
    return ChaosDataset(url, dict(environment), [zlib.crc32(each) for each in samples], lengths, first_sample)


def _client(environment: Mapping[str, str]) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_REGION"],
    )
