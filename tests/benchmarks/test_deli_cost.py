"""DELI's cost model gives the papers' answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.papers.deli_cost import Run, run_cost

from refill_service.planning.run_cost import ProviderPrices

RUN = Run(
    ProviderPrices(class_a=5e-6, class_b=4e-7, bucket_gb=0.02),
    run_seconds=36_000,
    vm_hour=1.0,
    nodes=4,
    epochs=10,
    gets=100_000,
    listed=100_000,
    fetch_size=2000,
    disk_gb=0.1,
    system_gb=20,
    data_gb=50,
    cache_gb=2,
)


def test_a_run_with_a_service_that_fetches() -> None:
    found = run_cost(RUN)
    assert (found.api, found.storage, found.vms) == pytest.approx((0.65, 9.80, 40.00))
    assert found.total == pytest.approx(50.45)


def test_without_a_service_the_bucket_is_listed_once_an_epoch() -> None:
    found = run_cost(replace(RUN, fetch_size=0))
    assert found.api == pytest.approx(10 * (100 * 5e-6 + 100_000 * 4e-7))
    odd = run_cost(replace(RUN, gets=7, listed=1001, fetch_size=3))
    assert odd.api == pytest.approx(10 * (2 * 3 * 5e-6 + 7 * 4e-7)), "pages and fetches are whole"


def test_without_a_bucket_each_machine_has_the_dataset() -> None:
    found = run_cost(replace(RUN, bucket=False))
    assert (found.api, found.storage) == (0, pytest.approx(4 * 0.1 * 70))
