"""What do tests of the client share? A fake pod of forty samples, and datasets that read from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.client.fake_pod import FakePod, serving, text_samples

from refill import CacheDataset

NUM_SAMPLES = 40


@pytest.fixture
def pod() -> Iterator[FakePod]:
    with serving(FakePod(text_samples(NUM_SAMPLES))) as running:
        yield running


class DatasetOf:
    """Makes datasets that read from the pod at this URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, **arguments: Any) -> CacheDataset:
        settings = {"dataset": "file:///data", "job": "job", "policy": "redox", "timeout_seconds": 10, **arguments}
        return CacheDataset(self.url, **settings)


@pytest.fixture
def dataset_of(pod: FakePod) -> DatasetOf:
    return DatasetOf(pod.url)
