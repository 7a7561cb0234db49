"""Repeats of an epoch, in real pods: served from memory when there, read as the policy says, and nobody keeps them for
who never comes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
from tests.membership.pods_in_process import PodsInProcess, Training
from tests.waiting import until

from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import Int64Array
from refill_service.datasets.pack import pack
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.planning.listed_orders import dealt
from refill_service.planning.simulated_job import SimulatedJob, SimulatedPods

NUM_SAMPLES, SAMPLE_BYTES, NUM_PODS, NUM_EPOCHS, BATCH = 480, 1000, 3, 3, 16
CHUNK_SIZE = 8


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("repeats")
    (folder / "files").mkdir()
    for number in range(NUM_SAMPLES):
        (folder / "files" / f"{number:04}.bin").write_bytes(number.to_bytes(4, "big") * (SAMPLE_BYTES // 4))
    asyncio.run(pack(str(folder / "files"), f"file://{folder}/packed"))
    return f"file://{folder}/packed"


@pytest.fixture(scope="module")
def pods(dataset: str) -> Iterator[PodsInProcess]:
    # A request that waits longer than that is refused: on a machine that is busy, too, none is.
    with PodsInProcess(NUM_PODS, wait_seconds=60) as found:
        yield found


def weighted(epoch: int) -> Int64Array:
    """Half of the positions ask for a tenth of the samples; 40 % of the samples do not come."""
    random = np.random.default_rng(epoch)
    hot, any_of_them = random.integers(0, NUM_SAMPLES // 10, NUM_SAMPLES), random.integers(0, NUM_SAMPLES, NUM_SAMPLES)
    return np.where(random.random(NUM_SAMPLES) < 0.5, 10 * hot, any_of_them)


class WeightedTraining(Training):
    def __init__(self, pods: PodsInProcess, dataset: str, eviction: str, read_ahead: float = 0.0) -> None:
        spec = JobSpec(
            f"repeats-{uuid.uuid4().hex[:8]}",
            dataset,
            world_size=NUM_PODS,
            chunk_size=CHUNK_SIZE,
            memory_bytes=150_000,
            policy="exact",
            policy_settings={"eviction": eviction, "read_ahead": read_ahead},
            order="explicit",
            prefetch_window=0,
        )
        super().__init__(pods, spec, NUM_SAMPLES, BATCH)
        self.length = NUM_SAMPLES // NUM_PODS

    @property
    def jobs(self) -> list[JobAtPod]:
        return [self.pods.node(pod).jobs[self.spec.name] for pod in range(NUM_PODS)]

    def post(self, epoch: int) -> None:
        for rank, connection in enumerate(self.ranks):
            connection.post_trace(epoch, weighted(epoch)[rank::NUM_PODS])

    def ask_in_step(self, epoch: int) -> None:
        for first in range(0, self.length, BATCH):
            for rank in range(NUM_PODS):
                self.ask(rank, epoch, first, first + BATCH)
        self.check_order(epoch)

    def check_order(self, epoch: int) -> None:
        for rank in range(NUM_PODS):
            had = [self.samples[epoch, rank, position] for position in range(self.length)]
            assert had == weighted(epoch)[rank::NUM_PODS].tolist(), f"rank {rank} epoch {epoch}: another order"

    def most_held(self) -> int:
        return max(at_pod.owner.resident_bytes for at_pod in self.jobs)


@pytest.mark.variants("never")
@pytest.mark.parametrize("eviction", ["rolling", "never", pytest.param("lru", marks=pytest.mark.variant)])
def test_pods_read_of_weighted_traces_what_is_simulated(pods: PodsInProcess, dataset: str, eviction: str) -> None:
    """Ranks ask in step and nothing is read ahead, so that pods and simulation decide the same."""
    training = WeightedTraining(pods, dataset, eviction)
    job = training.jobs[0].job
    (sample_bytes,) = {int(length) for length in job.records.length}
    for epoch in range(NUM_EPOCHS + 1):  # the next epoch is known
        training.post(epoch)
    gets = 0
    for epoch in range(NUM_EPOCHS):
        training.ask_in_step(epoch)
        counts = training.ranks[0].epoch_counts(epoch)["total"]
        assert counts["exact_reads"] == 0, f"{counts['exact_reads']} samples of epoch {epoch} were read alone"
        gets += counts["refills"]
        assert counts["misses"] <= counts["takes"], "misses are of takes"
        assert training.most_held() <= job.abstract_bytes, "repeats take more memory than the job has"
    orders = dealt([weighted(epoch) for epoch in range(NUM_EPOCHS + 1)], NUM_SAMPLES, NUM_PODS)
    blob, lengths = np.array([0, NUM_SAMPLES]), np.ones(NUM_SAMPLES, dtype=np.int64)
    simulated = SimulatedJob.of(
        training.spec,
        blob,
        lengths,
        SimulatedPods(NUM_PODS, job.abstract_bytes // sample_bytes),
        NUM_EPOCHS,
        batch_size=BATCH,
        orders=orders,
    )
    # Of a batch, another pod may be asked for the repeats first.
    assert gets == pytest.approx(sum(reads.gets for reads in simulated.run(NUM_EPOCHS)), rel=0.03)


def test_nothing_stays_that_nobody_wants(pods: PodsInProcess, dataset: str) -> None:
    """Ranks go at their own pace, and reads are under way for requests and for repeats of the same samples."""
    training = WeightedTraining(pods, dataset, "rolling", read_ahead=1 / 32)
    for epoch in (0, 1):
        training.post(epoch)
        training.all_ask(epoch, 0, 80)
        training.all_ask(epoch, 64)
        training.check_order(epoch)
        receipt = training.receipt(epoch)
        asked_for = len(np.unique(weighted(epoch)))
        assert (receipt["delivered"], receipt["duplicates"], receipt["missing"]) == (asked_for, 0, 0)
    for at_pod in training.jobs:
        owner = at_pod.owner
        until(lambda owner=owner: not owner.reads, "the end of all reads")  # type: ignore[misc]
        wanted_bytes = sum(running.core.held_bytes for running in owner.epochs)
        assert owner.resident_bytes <= wanted_bytes <= at_pod.job.abstract_bytes, "bytes stay that nobody wants"
