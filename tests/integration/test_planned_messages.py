"""What do pods of a planned job ask each other? Nothing where an epoch ends and the next one begins, and nothing within
an epoch, while ranks ask all of them: looked up in what pods log of requests at the port for other pods.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.integration.job_ranks import Packed, cluster_of, settings_of
from tests.pod_fixtures import whole_epoch

from refill.pods import planned_pods
from refill.pods.planned_connection import PlannedConnection
from refill.pods.planned_place import RankPlace
from refill.protocol.job_spec import JobSpec
from refill_service.demo.local_cluster import LocalCluster

BATCH = 100


@pytest.fixture
def logging_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.setattr(planned_pods, "_SILENT_SECONDS", 60.0)  # a busy machine's pods are late, and not away
    with cluster_of(tmp_path, 3, access_log="true") as cluster:
        yield cluster


def messages_of(cluster: LocalCluster) -> list[str]:
    """Between pods, of planned jobs that they know. Signs of life are none."""
    lines = [line for pod in range(cluster.num_pods) for line in cluster.log(pod).splitlines()]
    return [line for line in lines if ": pod " in line and "/planned/" in line]


def test_pods_ask_each_other_nothing_at_the_end_of_an_epoch(logging_pods: LocalCluster, packed: Packed) -> None:
    job = settings_of(packed[0], policy="planned", num_epochs=0, world_size=2)
    place = [RankPlace([0] * RankPlace.NUM_SHARED) for _ in range(2)]
    url, spec = logging_pods.pod_urls[0], JobSpec.from_dict(job)
    ranks = [PlannedConnection(url, spec, rank, None, 30, place=place[rank]) for rank in range(2)]
    for rank in ranks:
        rank.asks_in_batches(BATCH)
    for epoch in range(3):
        for rank in ranks:
            whole_epoch(rank, epoch, BATCH)
    # Of a loader whose workers are made anew for each epoch, and share the rank's place.
    anew = PlannedConnection(url, spec, 0, None, 30, place=place[0])
    whole_epoch(anew, 3, BATCH)
    assert messages_of(logging_pods) == [], "pods asked each other, though ranks asked all of them"
    ranks[0].end_job()


def test_who_has_left_positions_out_is_looked_for(logging_pods: LocalCluster, packed: Packed) -> None:
    job = settings_of(packed[0], policy="planned", num_epochs=0, world_size=1)
    rank = PlannedConnection(logging_pods.pod_urls[0], JobSpec.from_dict(job), 0, None, 30)
    rank.asks_in_batches(BATCH)
    for start in (0, 200, 300):
        rank.batch(0, np.arange(start, start + BATCH))
    assert messages_of(logging_pods) == [], "pods asked each other within an epoch"
    rank.batch(1, np.arange(BATCH))
    asked = [line for line in messages_of(logging_pods) if "/planned/epochs/0/ranks/0" in line]
    assert asked, "no pod asked the others what the rank has left out"
    rank.end_job()
