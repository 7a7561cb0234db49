"""What do receipts of planned jobs say that pods have to be told? All that ranks have had, however short an epoch was,
and whatever pods have lost.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.integration.job_ranks import Packed, cluster_of, receipt, settings_of
from tests.pod_fixtures import NUM_SAMPLES, whole_epoch
from tests.waiting import until

from refill.pods.planned_connection import PlannedConnection
from refill.pods.planned_place import goes_on_from, state_at
from refill.protocol.job_spec import JobSpec
from refill_service.demo.local_cluster import LocalCluster


def test_epochs_that_are_over_before_they_are_reported(three_pods: LocalCluster, packed: Packed) -> None:
    job = settings_of(packed[0], policy="planned", world_size=1, num_epochs=0)
    rank = PlannedConnection(three_pods.pod_urls[0], JobSpec.from_dict(job), 0, None, 30)
    rank.look_every_seconds = 100  # it is told below to report
    for epoch in range(5):
        whole_epoch(rank, epoch, batch=500)
    rank.report_received()
    assert [receipt(three_pods, job, epoch)["exact"] for epoch in range(5)] == [True] * 5
    rank.end_job()


def test_what_lies_in_a_checkpoint_was_received(packed: Packed, tmp_path: Path) -> None:
    with cluster_of(tmp_path, 1) as cluster:
        job = settings_of(packed[0], policy="planned", world_size=1)
        spec = JobSpec.from_dict(job)
        first = PlannedConnection(cluster.pod_urls[0], spec, 0, None, 30)
        first.batch(0, np.arange(500))
        state = state_at(first, 0, 400, NUM_SAMPLES)
        cluster.kill(0)
        cluster.restart(0)
        second = PlannedConnection(cluster.pod_urls[0], spec, 0, None, 30)
        assert goes_on_from(state, second).next_place == (0, 400)
        second.batch(0, np.arange(400, NUM_SAMPLES))
        until(lambda: receipt(cluster, job, 0)["exact"], "an exact receipt")
