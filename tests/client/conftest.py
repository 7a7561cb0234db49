"""A fake pod with forty small samples, and datasets that read from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

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
        settings = {"dataset": "file:///data", "job": "job", "timeout_seconds": 10, **arguments}
        return CacheDataset(pod.url, **settings)

    return make


@pytest.fixture(autouse=True)
def no_dataset_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets of a rank in one process share what it has received, and those of other tests may not be collected."""
    monkeypatch.setattr("refill.torch_dataset._records", WeakValueDictionary())
