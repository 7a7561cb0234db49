"""What do tests of the client share? A fake pod of forty samples, datasets that read from it, a folder for records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
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
        settings = {"dataset": "file:///data", "job": "job", "policy": "redox", "timeout_seconds": 10, **arguments}
        return CacheDataset(pod.url, **settings)

    return make


@pytest.fixture(autouse=True)
def no_dataset_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets of a rank in one process share what it has received, and those of other tests may not be collected."""
    monkeypatch.setattr("refill.job_samples._records", WeakValueDictionary())


@pytest.fixture
def records_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delivery records are made in a folder that this test has for itself."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
