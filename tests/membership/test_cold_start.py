"""How soon do ranks have their first batches, where pods have nothing? Counted in rounds of a store, and in bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.conftest import S3Server
from tests.membership.planned_in_process import Run, new_name
from tests.membership.pods_in_process import PodsInProcess
from tests.s3_counts import counting
from tests.s3_rounds import Rounds, in_rounds
from tests.waiting import until

from refill_service.datasets.pack_samples import pack_samples

NUM_PODS, MOST_ROUNDS = 3, 6


@pytest.fixture
def rounds(s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rounds]:
    with in_rounds(s3_environment.endpoint_url) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        yield found


def packed(url: str, num_samples: int, sample_bytes: int) -> str:
    samples = ({"bin": number.to_bytes(4, "big") * (sample_bytes // 4)} for number in range(num_samples))
    asyncio.run(pack_samples(samples, url, blob_bytes=8 << 20))
    return url


def pods_of(memory: str) -> PodsInProcess:
    settings: dict[str, Any] = {"dataset_urls": "s3://", "wait_seconds": 60, "memory_bytes": memory}
    return PodsInProcess(NUM_PODS, **settings)


def rounds_to_first_batches(rounds: Rounds, pods: PodsInProcess, run: Run, epoch: int, batch: int, start: int) -> int:
    takes = [partial(run.take_batch, rank, epoch, np.arange(start, start + batch)) for rank in range(len(run.ranks))]
    return rounds.of(pods, *takes)


@pytest.mark.variants("an index that one request does not bring")
@pytest.mark.parametrize(
    ("num_samples", "sample_bytes", "chunk_size", "num_ranks", "batch"),
    [
        pytest.param(20_000, 100, 16, 4, 48, id="an index that one request does not bring"),
        pytest.param(6000, 100, 64, 2, 128, id="large chunks of small samples", marks=pytest.mark.variant),
        pytest.param(1536, 20_000, 8, 4, 64, id="samples whose chunks fill a link"),
        pytest.param(1536, 20_000, 16, 2, 64, id="larger chunks", marks=pytest.mark.variant),
    ],
)
def test_first_batches_come_within_six_rounds_and_again_after_all_memory_is_lost(
    s3_environment: S3Server,
    rounds: Rounds,
    num_samples: int,
    sample_bytes: int,
    chunk_size: int,
    num_ranks: int,
    batch: int,
) -> None:
    url = packed(f"s3://{s3_environment.new_bucket()}/samples", num_samples, sample_bytes)
    with pods_of("64MiB") as pods:
        more = {"chunk_size": chunk_size, "memory_bytes": 2_000_000 + num_samples * sample_bytes // 10}
        run = Run(pods, url, new_name(), num_ranks, first_pod=1, timeout_seconds=60, **more)
        registered = rounds.of(pods, *(partial(getattr, each, "connection") for each in run.datasets))
        came = rounds_to_first_batches(rounds, pods, run, 0, batch, 0)
        middle = num_samples // num_ranks // batch // 2 * batch
        # Else the store goes on with requests of pods that are gone.
        until(lambda: rounds.nothing_is_under_way(pods), "reads ahead to be done")
        pods.kill(0, 1, 2)
        pods.start(0, 1, 2)
        again = rounds_to_first_batches(rounds, pods, run, 1, batch, middle)
        print(f"rounds: {registered} to register, {came} to the first batches, {again} when memory was lost")
        assert registered + came <= MOST_ROUNDS
        assert again <= MOST_ROUNDS
        run.check(url)


@pytest.mark.parametrize("chunk_size", [pytest.param(16, marks=pytest.mark.variant), 64])
def test_three_pods_that_lose_their_memory_in_mid_epoch_read_no_more_than_two_and_a_half_times_of_it_again(
    s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch, chunk_size: int
) -> None:
    num_samples, batch, num_ranks = 8192, 128, 2
    url = packed(f"s3://{s3_environment.new_bucket()}/samples", num_samples, 1000)
    with counting(s3_environment.endpoint_url) as served:
        monkeypatch.setenv("AWS_ENDPOINT_URL", served.url)
        with pods_of("16MiB") as pods:
            more = {"chunk_size": chunk_size, "memory_bytes": 900_000, "num_epochs": 2, "timeout_seconds": 60}
            run = Run(pods, url, new_name(), num_ranks, **more)
            length = run.length(1)
            middle = length // 2 // batch * batch
            for epoch, first, end in ((0, 0, length), (1, 0, middle), (1, middle, length)):
                for start in range(first, end, batch):
                    for rank in range(num_ranks):
                        run.take_batch(rank, epoch, np.arange(start, min(start + batch, end)))
                if end == middle:
                    pods.kill(0, 1, 2)
                    pods.start(0, 1, 2)
            total_bytes, memory_bytes = run.ranks[0].info()["total_bytes"], run.plan.memory_bytes
            run.check(url)
    again = (sum(served.sizes) - 2 * total_bytes) / memory_bytes
    print(f"K={chunk_size}: {again:.2f} M again, memory for {memory_bytes / total_bytes:.2f} of the dataset")
    assert memory_bytes < total_bytes / 4, "memory for so much tries nothing"
    assert 0 < again <= 2.5
