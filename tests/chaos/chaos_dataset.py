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

from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.pack import pack

__all__ = ["ChaosDataset", "dataset_in_s3"]

NUM_SAMPLES = 960
"""Two and three ranks divide it without a rest, so that no position repeats a sample."""


@dataclass(frozen=True)
class ChaosDataset:
    url: str
    environment: Mapping[str, str]
    """By which the store is reached."""
    checksums: list[int]
    """crc32 of the bytes of each sample, by its id."""
    num_bytes: int

    @property
    def endpoint(self) -> str:
        return self.environment["AWS_ENDPOINT_URL"]


def dataset_in_s3(
    environment: Mapping[str, str], *, num_samples: int = NUM_SAMPLES, most_bytes: int = 4000, seed: int = 1
) -> ChaosDataset:
    """Packs files of 100 to ``most_bytes`` bytes and copies the dataset into a bucket of its own."""
    generator = random.Random(seed)
    bucket = f"chaos-{uuid.uuid4().hex[:12]}"
    with tempfile.TemporaryDirectory(prefix="refill-chaos-") as folder:
        files, store = Path(folder) / "files", Path(folder) / "store"
        files.mkdir()
        for number in range(num_samples):
            content = generator.randbytes(generator.randint(100, most_bytes))
            (files / f"sample{number:06}.bin").write_bytes(content)
        asyncio.run(pack(str(files), store.as_uri(), blob_bytes=75 * most_bytes))
        client = _client(environment)
        client.create_bucket(Bucket=bucket)
        for path in store.rglob("*"):
            if path.is_file():
                client.put_object(Bucket=bucket, Key=path.relative_to(store).as_posix(), Body=path.read_bytes())
        checksums, num_bytes = asyncio.run(_checksums(store))
    return ChaosDataset(f"s3://{bucket}", dict(environment), checksums, num_bytes)


async def _checksums(store: Path) -> tuple[list[int], int]:
    dataset = await Dataset.open(store.as_uri())
    records = await dataset.load_records(0, dataset.num_samples)
    blobs = {name: (store / name).read_bytes() for name in dataset.blobs.names}
    samples = []
    for sample in range(dataset.num_samples):
        first, length = int(records.offset[sample]), int(records.length[sample])
        samples.append(blobs[dataset.blobs.names[dataset.blobs.blob_of(sample)]][first : first + length])
    await dataset.close()
    return [zlib.crc32(sample) for sample in samples], sum(map(len, samples))


def _client(environment: Mapping[str, str]) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_REGION"],
    )
