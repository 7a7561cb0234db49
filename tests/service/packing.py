"""How do tests pack a folder, and read back what came out?"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from refill_service.cache_core.dataset_index import SampleRecords
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.pack import PackSummary, pack

__all__ = ["blobs_of", "everything", "names_at", "packed"]


def packed(source: Path, url: str, **options: Any) -> PackSummary:
    return asyncio.run(pack(str(source), url, **{"blob_bytes": 40_000, **options}))


def everything(url: str) -> tuple[dict[str, bytes], dict[str, Any], SampleRecords, list[bytes]]:
    """Objects by key, metadata, records, and the bytes of each sample, verified."""

    async def read() -> tuple[dict[str, bytes], dict[str, Any], SampleRecords, list[bytes]]:
        dataset = await Dataset.open(url)
        objects = {}
        async for key, size, _ in dataset.store.list():
            objects[key] = bytes(await dataset.store.read_range(key, 0, size))
        records = await dataset.load_records(0, dataset.num_samples)
        samples = []
        for sample in range(dataset.num_samples):
            payload = await dataset.read_samples(records, sample, sample + 1)
            dataset.verify_sample(payload, records, sample)
            samples.append(bytes(payload))
        await dataset.close()
        return objects, dataset.index.metadata, records, samples

    return asyncio.run(read())


def blobs_of(objects: dict[str, bytes]) -> dict[str, bytes]:
    return {key: data for key, data in sorted(objects.items()) if key.endswith(".tar")}


def names_at(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
