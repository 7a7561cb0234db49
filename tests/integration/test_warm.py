"""``refill warm``: what an epoch begins with is in memory before anybody asks for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.integration.job_ranks import Packed, cluster_of, settings_of
from tests.pod_fixtures import NUM_SAMPLES, rank_of

from refill_service import cli


def test_first_batches_of_a_warmed_job_are_in_memory(packed: Packed, tmp_path: Path, capsys: object) -> None:
    with cluster_of(tmp_path, 3) as cluster:
        job = settings_of(packed[0], policy="planned", world_size=2, seed=5, num_epochs=0)
        arguments = ["--job", job["name"], "--seed", "5", "--chunk-size", "16", "--memory-bytes", "600kB"]
        url = ["--url", cluster.pod_urls[1]]
        for position, name in ((0, job["name"]), (NUM_SAMPLES // 2, "halfway")):
            arguments[1] = name
            assert cli.main(["warm", packed[0], *arguments, *url, "--position", str(position)]) == 0
            ranks = [rank_of(cluster, job | {"name": name}, rank) for rank in range(2)]
            first = position // 2
            for rank in ranks:
                rank.batch(0, np.arange(first, first + 10))
            counts = ranks[0].epoch_counts(0)["total"]
            assert (counts["takes"], counts["misses"]) == (20, 0), f"from position {position}: {counts}"
        assert cli.main(["warm", packed[0], *arguments, *url, "--seed", "6"]) != 0, "the job has another seed"
