"""How do tests run a job while pods come and go? Ranks that remember what they were given."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tests.pod_fixtures import NUM_SAMPLES, rank_of
from tests.waiting import until

from refill.pods.pod_connection import PodConnection
from refill_service.demo.local_cluster import LocalCluster

Packed = tuple[str, dict[str, bytes]]
BATCH = 50


def settings_of(dataset: str, **more: Any) -> dict[str, Any]:
    return {
        "name": f"restarts-{uuid.uuid4().hex[:8]}",
        "dataset": dataset,
        "chunk_size": 16,
        "memory_bytes": 600_000,
        "world_size": 3,
        "num_epochs": 2,
    } | more


def cluster_of(folder: Path, num_pods: int, **settings: Any) -> LocalCluster:
    return LocalCluster(num_pods, folder, {"memory_bytes": "4MiB", "pinned_fraction": 0} | settings)


class Ranks:
    """The ranks of a job, each in a thread: they ask for batches one after another, and meet at given positions."""

    def __init__(self, cluster: LocalCluster, job: dict[str, Any], timeout_seconds: float = 60) -> None:
        self.ranks = [rank_of(cluster, job, rank, timeout_seconds) for rank in range(job["world_size"])]
        self.samples: dict[tuple[int, int, int], int] = {}
        self.errors: list[BaseException] = []
        self.length = int(self.ranks[0].info()["samples_per_rank"])

    def ask(self, epoch: int, first: int, end: int) -> None:
        threads = [threading.Thread(target=self._ask, args=(rank, epoch, first, end)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a rank hangs"
        if self.errors:
            raise self.errors[0]

    def _ask(self, rank: PodConnection, epoch: int, first: int, end: int) -> None:
        try:
            for start in range(first, min(end, self.length), BATCH):
                positions = np.arange(start, min(start + BATCH, end, self.length))
                for position, sample in zip(positions, rank.batch(epoch, positions).sample_ids.tolist(), strict=True):
                    before = self.samples.setdefault((epoch, rank.rank, int(position)), sample)
                    assert before == sample, f"rank {rank.rank} position {position}: {before}, asked again {sample}"
        except BaseException as error:
            self.errors.append(error)

    def check(self, epoch: int) -> None:
        samples = [sample for (of_epoch, _, _), sample in self.samples.items() if of_epoch == epoch]
        repeats = len(self.ranks) * self.length - NUM_SAMPLES
        missing = NUM_SAMPLES - len(set(samples))
        assert not missing, f"{missing} samples are missing"
        assert len(samples) == NUM_SAMPLES + repeats, "samples came twice"


def receipt(cluster: LocalCluster, job: dict[str, Any], epoch: int, pod: int = 0) -> dict[str, Any]:
    answer = httpx.get(f"{cluster.pod_urls[pod]}/v1/jobs/{job['name']}/epochs/{epoch}/receipt", timeout=30)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def exact_receipt(cluster: LocalCluster, job: dict[str, Any], epoch: int, pod: int = 0) -> dict[str, Any]:
    """Of a planned job: ranks report what has come a moment later."""
    found: dict[str, Any] = {}

    def is_exact() -> bool:
        found.update(receipt(cluster, job, epoch, pod))
        return bool(found["exact"])

    try:
        until(is_exact, "an exact receipt")
    except AssertionError as error:
        raise AssertionError(f"{error}: {found}") from None
    return found
