"""A job that was ended goes on from a state, also with other memory than before: its plan is that of the state."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from itertools import islice
from typing import Any

import httpx
import pytest
from tests.integration.job_ranks import Packed
from tests.pod_fixtures import NUM_SAMPLES
from torch.utils.data import DataLoader

import refill
from refill_service.demo.local_cluster import LocalCluster

BATCH, SAVED_AT = 50, 4
MEMORY: list[tuple[str | None, str | None]] = [(None, "1MiB"), ("1MiB", "2MiB"), ("2MiB", "1MiB"), ("2MiB", None)]
"""Before, and after."""


class Training:
    """A loop of its own objects, as in a process that is started anew."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.sampler = dataset, refill.EpochSampler(dataset)
        loader: Any = DataLoader(dataset, BATCH, sampler=self.sampler, collate_fn=list)
        self.loader = refill.timed(loader, dataset)

    def ids(self, batches: int | None = None) -> list[Any]:
        loop: Iterator[Any] = iter(self.loader)
        return [(s.get("__dataset__"), s["__id__"]) for batch in islice(loop, batches) for s in batch]


def of_kind(kind: str, pods: LocalCluster, url: str, job: str, memory_bytes: str | None) -> Training:
    given: dict[str, Any] = {"job": job, "memory_bytes": memory_bytes, "num_epochs": 1}
    if kind == "a mixture":
        return Training(refill.Mixture(pods.pod_urls[0], {"a": url, "b": url}, **given))
    return Training(refill.CacheDataset(pods.pod_urls[0], dataset=url, **given))


@pytest.mark.parametrize("kind", ["a dataset", "a mixture"])
@pytest.mark.parametrize(("before", "after"), MEMORY)
def test_it_goes_on_where_the_state_was_saved(
    three_pods: LocalCluster, packed: Packed, kind: str, before: str | None, after: str | None
) -> None:
    job = f"ended-{uuid.uuid4().hex[:8]}"
    first = of_kind(kind, three_pods, packed[0], job, before)
    had = first.ids(SAVED_AT)
    state = first.loader.state_dict()
    first.dataset.end_job()
    second = of_kind(kind, three_pods, packed[0], job, after)
    second.loader.load_state_dict(state)
    for name in [job] if kind == "a dataset" else [f"{job}.a", f"{job}.b"]:
        plans = {httpx.get(f"{url}/v1/jobs/{name}").json()["plan_id"] for url in three_pods.pod_urls}
        assert len(plans) == 1, f"pods have job {name} by different plans"
    rest = second.ids()
    second.dataset.end_job()
    assert len(had) == SAVED_AT * BATCH
    num_samples = NUM_SAMPLES * (2 if kind == "a mixture" else 1)
    assert len(had) + len(rest) == num_samples
    assert len({*had, *rest}) == num_samples, "a sample came twice"


def test_it_goes_on_though_other_jobs_have_come_meanwhile(three_pods: LocalCluster, packed: Packed) -> None:
    """So that a plan that was made now would be another one."""
    job = f"ended-{uuid.uuid4().hex[:8]}"
    first = of_kind("a dataset", three_pods, packed[0], job, None)
    had = first.ids(SAVED_AT)
    state = first.loader.state_dict()
    first.dataset.end_job()
    others = [of_kind("a dataset", three_pods, packed[0], f"{job}-{number}", "1MiB") for number in range(2)]
    for other in others:
        other.ids(1)
    second = of_kind("a dataset", three_pods, packed[0], job, None)
    second.loader.load_state_dict(state)
    rest = second.ids()
    for each in (second, *others):
        each.dataset.end_job()
    assert sorted(had + rest) == [(None, sample) for sample in range(NUM_SAMPLES)]
