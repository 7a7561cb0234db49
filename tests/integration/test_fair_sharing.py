"""A small job beside a greedy one, at one real pod with a slow store: it gets about its share of the reads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tests.conftest import S3Server
from tests.pod_fixtures import NUM_SAMPLES, metric, rank_of, settings_of
from tests.running_gate import gate
from tests.waiting import until

from refill_service.demo.local_cluster import LocalCluster


def test_a_small_job_is_served_beside_a_greedy_one(s3_server: S3Server, in_s3: str, tmp_path: Path) -> None:
    """The greedy one asks for single samples, far more at once than the small one; all have to be read."""
    settings: dict[str, Any] = {"memory_bytes": "8MiB", "pinned_fraction": 0, "in_flight_fraction": 0.005}
    with gate(s3_server.endpoint_url, "--delay-seconds", "0.02") as endpoint:
        environment = s3_server.environment | {"AWS_ENDPOINT_URL": endpoint}
        with LocalCluster(1, tmp_path, settings, environment) as cluster, ThreadPoolExecutor(9) as pool:
            url = cluster.pod_urls[0]
            jobs = [settings_of(in_s3, memory_bytes=2_000_000, name=name) for name in ("greedy", "small")]
            greedy, small = (rank_of(cluster, job) for job in jobs)
            greedy.info()
            small.info()
            stop = threading.Event()

            def ask_for_ever() -> None:
                while not stop.is_set():
                    rank_of(cluster, jobs[0], timeout_seconds=0).samples(np.arange(NUM_SAMPLES))

            asking = [pool.submit(ask_for_ever) for _ in range(8)]
            try:
                until(lambda: reads(url) >= 50, "a read of the greedy job")
                before = reads(url)
                small.samples(np.arange(100))
                beside = reads(url) - before - 100
            finally:
                stop.set()
                cluster.kill(0)  # all that was asked for would take long
                for each in asking:
                    each.exception(60)
    # In turns it would be 100; both ends of it are asked for over HTTP, so a little more.
    assert beside < 300, f"100 reads of a small job took as long as {beside:.0f} of a greedy one"


def reads(url: str) -> float:
    return metric(url, "refill_store_requests_total", operation="read_range")
