"""Do pods read from a real S3 server what `refill simulate` says? GETs and bytes are counted at the server."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import S3Server
from tests.membership.pods_in_process import PodsInProcess, Training
from tests.s3_counts import counting

from refill.protocol.job_spec import JobSpec
from refill_service.datasets.pack import pack
from refill_service.planning.simulated_job import SimulatedJob, SimulatedPods

NUM_SAMPLES, CHUNK_SIZE, NUM_PODS, NUM_EPOCHS, BATCH, SEED = 576, 8, 3, 2, 8, 5


@pytest.mark.variant
def test_reads_of_three_pods_are_those_that_are_simulated(
    s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ranks ask in step and nothing is read ahead, so that pods and simulation decide the same."""
    files = tmp_path / "files"
    files.mkdir()
    for number in range(NUM_SAMPLES):
        (files / f"{number:04}.bin").write_bytes(number.to_bytes(4, "big") * 250)
    dataset = f"s3://{s3_environment.new_bucket()}/samples"
    asyncio.run(pack(str(files), dataset))
    with counting(s3_environment.endpoint_url) as served:
        monkeypatch.setenv("AWS_ENDPOINT_URL", served.url)
        # A request that waits longer than that reads its sample alone: on a machine that is busy, too, none does.
        with PodsInProcess(NUM_PODS, dataset_urls="s3://", wait_seconds=60) as pods:
            spec = JobSpec(
                f"job-{uuid.uuid4().hex[:8]}",
                dataset,
                world_size=NUM_PODS,
                seed=SEED,
                chunk_size=CHUNK_SIZE,
                memory_bytes=150_100,
                policy="exact",
                policy_settings={"read_ahead": 0.0},
                prefetch_window=0,
            )
            training = Training(pods, spec, NUM_SAMPLES, BATCH)
            job = pods.node(0).jobs[spec.name].job
            (sample_bytes,) = {int(length) for length in job.records.length}
            found = []
            for epoch in range(NUM_EPOCHS):
                before = len(served.sizes)
                for first in range(0, training.length, BATCH):
                    for rank in range(NUM_PODS):
                        training.ask(rank, epoch, first, first + BATCH)
                training.check(epoch)
                of_epoch = served.sizes[before:]
                alone = [size for size in of_epoch if size % (CHUNK_SIZE * sample_bytes)]
                assert not alone, f"{len(alone)} samples of epoch {epoch} were thought to be in memory, and read alone"
                found.append((len(of_epoch), sum(of_epoch)))
    simulated_pods = SimulatedPods(NUM_PODS, job.abstract_bytes // sample_bytes)
    blob, lengths = np.array([0, NUM_SAMPLES]), np.ones(NUM_SAMPLES, dtype=np.int64)
    simulated = SimulatedJob.of(spec, blob, lengths, simulated_pods, NUM_EPOCHS, batch_size=BATCH).run(NUM_EPOCHS)
    for (gets, num_bytes), reads in zip(found, simulated, strict=True):
        assert num_bytes / sample_bytes == pytest.approx(reads.samples_read, rel=0.03)
        # Chunks that lie side by side and are wanted at once are one GET.
        assert 0.9 * reads.gets <= gets <= 1.03 * reads.gets
