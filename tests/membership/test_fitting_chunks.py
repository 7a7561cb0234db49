"""Does a job that names no chunk size read blobs of others in as few GETs as whole chunks would take?"""

from __future__ import annotations

from pathlib import Path

from tests.membership.planned_in_process import Run, new_name
from tests.membership.pods_in_process import PodsInProcess
from tests.service.datasets_on_disk import tar_of

from refill_service.cli import main

NUM_BLOBS, PER_BLOB, EPOCHS = 60, 50, 2


def test_a_job_reads_blobs_of_others_in_whole_chunks(tmp_path: Path) -> None:
    for blob in range(NUM_BLOBS):
        members = [(f"{blob:03}-{sample:02}.bin", bytes(400)) for sample in range(PER_BLOB)]
        (tmp_path / f"{blob:03}.tar").write_bytes(tar_of(members))
    url = tmp_path.as_uri()
    assert main(["index", url, "--quiet", "--jobs", "1"]) == 0
    with PodsInProcess(1, memory_bytes="8MB", pinned_fraction=0) as pods:
        run = Run(pods, url, new_name(), 1, chunk_size=0, memory_bytes=0, num_epochs=EPOCHS)
        run.ranks[0].info()
        assert run.plan.chunk_size == 17, "three chunks of a blob, where 16 makes four"
        reads = pods.node(0).store_counters.operations["read_range"]
        before = reads.requests
        for epoch in range(EPOCHS):
            run.take(epoch)
            assert sorted(run.positions_of(epoch)) == list(range(NUM_BLOBS * PER_BLOB))
        run.check(url)
        of_first_batch = 50
        assert reads.requests - before <= EPOCHS * NUM_BLOBS * 3 + of_first_batch < EPOCHS * NUM_BLOBS * 4
        # A state has the chunk size that the run began with.
        again = Run(pods, url, run.name, 1, run.states(1, 100), chunk_size=0, memory_bytes=0, num_epochs=EPOCHS)
        again.take(1, 100)
        assert again.plan == run.plan
        again.check(url)
