"""What do tests of the client share? A fake pod of forty samples, and datasets that read from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.client.fake_pod import FakePod, serving, text_samples

from refill import CacheDataset

NUM_SAMPLES = 40


@pytest.fixture
def pod() -> Iterator[FakePod]:
    with serving(FakePod(text_samples(NUM_SAMPLES))) as running:
        yield running


@pytest.fixture
def dataset_of(pod: FakePod) -> Callable[..., CacheDataset]:
    def make(**arguments: Any) -> CacheDataset:
        settings = {"dataset": "file:///data", "job": "job", "policy": "redox", "timeout_seconds": 10, **arguments}
        return CacheDataset(pod.url, **settings)

    return make
