"""A GET that hangs for ever holds no batch of a planned job up: pods read it once more, and few others."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from tests.conftest import S3Server
from tests.membership.planned_in_process import Run, new_name
from tests.membership.pods_in_process import PodsInProcess
from tests.s3_stalls import Asked, stalling

from refill_service.datasets.pack import pack

NUM_SAMPLES, CHUNK_SIZE = 3200, 8


def test_batches_come_though_gets_hang_for_ever(
    s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for number in range(NUM_SAMPLES):
        (files / f"{number:04}.bin").write_bytes(number.to_bytes(4, "big") * 250)
    dataset = f"s3://{s3_environment.new_bucket()}/samples"
    asyncio.run(pack(str(files), dataset))
    hung: list[Asked] = []
    numbers = itertools.count()

    with stalling(s3_environment.endpoint_url) as stalls:

        def hangs(asked: Asked, time: int) -> bool:
            """The 20th, and one in 200, each of them once."""
            is_one = next(numbers) % 200 == 20 and asked not in hung and asked[0].endswith(".tar")
            if is_one:
                hung.append(asked)
            return is_one

        stalls.hangs = hangs
        monkeypatch.setenv("AWS_ENDPOINT_URL", stalls.url)
        settings = {"dataset_urls": "s3://", "wait_seconds": 60, "memory_bytes": "16MiB"}
        with PodsInProcess(3, **settings) as pods:
            more = {"chunk_size": CHUNK_SIZE, "memory_bytes": 750_000, "timeout_seconds": 60}
            run = Run(pods, dataset, new_name(), 2, **more)
            for epoch in range(2):
                run.take(epoch)
            stores = [pods.node(pod).store_counters for pod in range(3)]
            first = sum(store.operations["read_range"].requests for store in stores)
            second = sum(store.second_reads for store in stores)
            won = sum(store.second_reads_won for store in stores)
            left = sum(store.operations["read_range"].in_flight for store in stores)
    came = [(epoch, sample) for epoch, _, sample in run.came]
    assert sorted(came) == [(epoch, sample) for epoch in range(2) for sample in range(NUM_SAMPLES)]
    assert len(hung) >= 3
    assert won + left >= len(hung)
    assert won >= 2
    assert second <= 0.02 * first
