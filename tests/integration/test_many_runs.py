"""A dozen runs an afternoon, each under a name of its own, none of them ended: the last one is as good as the first."""

from __future__ import annotations

from pathlib import Path

from tests.pod_fixtures import NUM_SAMPLES, rank_of, whole_epoch

from refill_service.demo.local_cluster import LocalCluster


def test_a_hundred_short_runs_in_a_row_have_the_same_memory(
    packed: tuple[str, dict[str, bytes]], tmp_path: Path
) -> None:
    """Half of what is free, again and again, would leave the twentieth run a millionth of the pod."""
    dataset, files = packed
    with LocalCluster(1, tmp_path, {"memory_bytes": "1GiB", "pinned_fraction": 0}) as cluster:
        memory = []
        for number in range(100):
            rank = rank_of(cluster, {"name": f"run-{number}", "dataset": dataset}, 0)
            info = rank.info()
            memory.append(info["memory_bytes"])
            assert info["group_size"] == 1, f"run {number} does not fit into memory any more"
            if number in (0, 99):
                samples = [sample for batch in whole_epoch(rank, 0) for sample in batch.sample_ids.tolist()]
                assert sorted(samples) == list(range(NUM_SAMPLES))
    assert set(memory) == {memory[0]}
    assert memory[0] < 4 * sum(map(len, files.values())) + (4 << 20), "far more than the dataset needs"
