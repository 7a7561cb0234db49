"""A dataset that is replaced in place while a planned job reads it: an error that names it, and never other bytes."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from tests.conftest import S3Server
from tests.membership.planned_in_process import BATCH, PlannedDataset, Run, new_name
from tests.membership.pods_in_process import PodsInProcess
from tests.pod_fixtures import write_files
from tests.s3_counts import Served, counting

from refill.errors import DatasetReplaced, JobConflict, SampleDamaged
from refill.pods.received_batch import ReceivedBatch
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.pack import pack
from refill_service.object_store import second_requests
from refill_service.object_store.base import ObjectReplaced, ObjectStore
from refill_service.object_store.open_store import open_store

NUM_SAMPLES = 400


class Stored:
    """A dataset of blobs of some 30 samples, in one kind of store."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self._folder = url, folder
        self.put(seed=1)
        self.bytes_of = asyncio.run(self._bytes_of())

    def put(self, seed: int) -> None:
        """The dataset of this seed, in place of what is there."""
        files = self._folder / f"files-{seed}"
        if not files.exists():
            files.mkdir(parents=True)
            write_files(files, NUM_SAMPLES, seed=seed)
        asyncio.run(pack(str(files), self.url, blob_bytes=60_000, force=True))

    def change_blobs(self, change: Callable[[bytearray], None]) -> None:
        """All blobs, in place: to be as long as they were."""
        asyncio.run(self._change_blobs(change))

    async def _change_blobs(self, change: Callable[[bytearray], None]) -> None:
        store = open_store(self.url)
        try:
            async for key, size_bytes, _ in store.list():
                if key.endswith(".tar"):
                    data = bytearray(await store.read_range(key, 0, size_bytes))
                    change(data)
                    assert len(data) == size_bytes
                    await _write_another(store, key, bytes(data))
        finally:
            await store.close()

    async def _bytes_of(self) -> list[bytes]:
        dataset = await Dataset.open(self.url)
        try:
            records = await dataset.load_records(0, NUM_SAMPLES)
            found = list[bytes]()
            for first, end in itertools.pairwise(dataset.blobs.first_sample):  # by one read each
                blob, wanted = await dataset.read_samples(records, first, end), records.part(first, end)
                starts = wanted.offset - wanted.offset[0]
                found += [bytes(blob[at : at + length]) for at, length in zip(starts, wanted.length, strict=True)]
            return found
        finally:
            await dataset.close()

    def check(self, batch: ReceivedBatch) -> None:
        for sample, payload in zip(batch.sample_ids.tolist(), batch.payloads, strict=True):
            assert bytes(payload) == self.bytes_of[sample], f"other bytes came for sample {sample}"


async def _write_another(store: ObjectStore, key: str, data: bytes) -> None:
    """Until it can be told from what was there: a file that is written twice in a moment may keep its time."""
    before = await store.etag(key)
    while True:
        await store.write(key, data)
        try:
            store.check_same(key, before, await store.etag(key))
        except ObjectReplaced:
            return


@pytest.fixture(params=["file", "s3"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Stored:
    if request.param == "file":
        return Stored((tmp_path / "store").as_uri(), tmp_path / "files")
    return Stored(f"s3://{request.getfixturevalue('s3_environment').new_bucket()}/samples", tmp_path / "files")


@pytest.fixture
def pods() -> Iterator[PodsInProcess]:
    with PodsInProcess(2, dataset_urls="file:///,s3://") as found:
        yield found


def run_of(pods: PodsInProcess, stored: Stored, **more: object) -> Run:
    return Run(pods, stored.url, new_name(), 1, memory_bytes=100_000, chunk_size=8, timeout_seconds=10, **more)


def taken(run: Run, stored: Stored, epoch: int, first: int, end: int) -> int:
    """Batches until an error; what comes is held against what was packed. Returns how many samples came."""
    for start in range(first, end, BATCH):
        batch = run.ranks[0].batch(epoch, np.arange(start, min(start + BATCH, end)))
        stored.check(batch)
        assert not batch.damaged, "it goes on without samples of a dataset that was replaced"
    return end - first


def invert(data: bytearray) -> None:
    data[:] = (np.frombuffer(data, np.uint8) ^ 255).tobytes()


def exchange_halves(data: bytearray) -> None:
    """As if samples of equal length had changed places."""
    half = len(data) // 2
    data[:half], data[half : 2 * half] = data[half : 2 * half], data[:half]


@pytest.mark.variants("s3-exchange_halves-raise", "file-invert-skip")
@pytest.mark.parametrize(("change", "on_damaged"), [(invert, "skip"), (exchange_halves, "raise")])
def test_other_blobs_in_mid_epoch(
    stored: Stored, pods: PodsInProcess, change: Callable[[bytearray], None], on_damaged: str
) -> None:
    run = run_of(pods, stored, on_damaged=on_damaged)
    taken(run, stored, 0, 0, NUM_SAMPLES)  # each blob has been read
    taken(run, stored, 1, 0, 100)
    stored.change_blobs(change)
    with pytest.raises(DatasetReplaced) as caught:
        taken(run, stored, 1, 100, NUM_SAMPLES)
    assert f"dataset {stored.url} was replaced while job {run.name} reads it" in str(caught.value)
    blob = caught.value.details["blob"]
    assert f"blob {blob} was replaced. End the job (refill end) and start it again" in str(caught.value)
    assert (blob, caught.value.details["dataset"]) == (blob, stored.url)


@pytest.mark.variants("s3")
def test_another_dataset_in_place_ends_also_who_goes_on_without_damaged_samples(
    stored: Stored, pods: PodsInProcess
) -> None:
    """Of blobs that nobody has read yet no ETag is known: then the index says it."""
    run = run_of(pods, stored, on_damaged="skip")
    taken(run, stored, 0, 0, 100)
    stored.put(seed=2)
    with pytest.raises(DatasetReplaced, match=r"was replaced while job .* reads it"):
        taken(run, stored, 0, 100, NUM_SAMPLES)


@pytest.mark.variants("file")
def test_a_moved_copy_goes_on_from_a_state(stored: Stored, pods: PodsInProcess, tmp_path: Path) -> None:
    """Other objects with other ETags, and the same fingerprint."""
    run = run_of(pods, stored)
    run.take(0, 0, 100)
    (state,) = run.states(0, 100)
    copy = Stored((tmp_path / "moved").as_uri(), tmp_path / "files")
    run.ranks[0].end_job()
    moved = Run(pods, copy.url, run.name, 1, states=state, memory_bytes=100_000, chunk_size=8, timeout_seconds=10)
    assert moved.plan == run.plan
    moved.take(0, 100)
    assert sorted(run.positions_of(0) + moved.positions_of(0)) == list(range(NUM_SAMPLES))
    moved.check(copy.url)


@pytest.mark.variants("s3")
@pytest.mark.parametrize("had", [100, NUM_SAMPLES], ids=["in mid-epoch", "at the end, with another plan"])
def test_a_state_of_another_dataset_says_so(stored: Stored, pods: PodsInProcess, tmp_path: Path, had: int) -> None:
    run = run_of(pods, stored)
    run.take(0, 0, had)
    (state,) = run.states(0, had)
    run.ranks[0].end_job()
    other = Stored((tmp_path / "other").as_uri(), tmp_path / "files")
    other.put(seed=2)
    chunk_size = 8 if had < NUM_SAMPLES else 4
    with pytest.raises(
        JobConflict, match=f"^the state is of dataset '{stored.url}', and '{other.url}' has other samples: end the job"
    ):
        PlannedDataset(
            pods, dataset=other.url, job=run.name, resume=state, memory_bytes=100_000, chunk_size=chunk_size
        ).register()


@pytest.mark.variants("s3")
def test_who_has_ended_the_job_goes_on_with_the_same_dataset(stored: Stored, pods: PodsInProcess) -> None:
    """The same bytes were written once more, to files with other times."""
    if not stored.url.startswith("file:"):
        pytest.skip("the same bytes have the same ETag there")
    run = run_of(pods, stored)
    taken(run, stored, 0, 0, 100)
    (state,) = run.states(0, 100)
    taken(run, stored, 0, 100, NUM_SAMPLES)
    stored.change_blobs(lambda data: None)
    with pytest.raises(DatasetReplaced):
        taken(run, stored, 1, 0, NUM_SAMPLES)
    run.ranks[0].end_job()
    again = Run(pods, stored.url, run.name, 1, states=state, memory_bytes=100_000, chunk_size=8, timeout_seconds=10)
    taken(again, stored, 0, 100, NUM_SAMPLES)
    stored.put(seed=2)
    again.ranks[0].end_job()
    with pytest.raises(JobConflict, match=r"was replaced since job .* began"):
        PlannedDataset(
            pods, dataset=stored.url, job=run.name, resume=state, memory_bytes=100_000, chunk_size=8
        ).register()


def test_a_blob_that_is_repaired_is_read_again(tmp_path: Path, pods: PodsInProcess) -> None:
    """Its samples were damaged when the job first read them: they come as soon as they are right."""
    stored = Stored((tmp_path / "store").as_uri(), tmp_path / "files")
    kept = tmp_path / "kept"
    shutil.copytree(urlsplit(stored.url).path, kept)
    stored.change_blobs(invert)
    run = run_of(pods, stored)
    with pytest.raises(SampleDamaged, match="its checksum is wrong"):
        taken(run, stored, 0, 0, BATCH)
    for blob in kept.glob("*.tar"):
        shutil.copy(blob, urlsplit(stored.url).path)
    taken(run, stored, 0, 0, NUM_SAMPLES)


def test_it_takes_no_request_more(
    s3_environment: S3Server, tmp_path: Path, pods: PodsInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored(f"s3://{s3_environment.new_bucket()}/samples", tmp_path / "files")
    served: Served
    with counting(s3_environment.endpoint_url) as served:
        monkeypatch.setenv("AWS_ENDPOINT_URL", served.url)
        # A busy machine is no store that hangs.
        monkeypatch.setattr(second_requests, "_LEAST_PATIENCE_SECONDS", 1e6)
        with PodsInProcess(2, dataset_urls="s3://") as counted:
            run = run_of(counted, stored, num_epochs=2)
            num_blobs = int(run.ranks[0].info()["num_blobs"])
            for epoch in range(2):
                taken(run, stored, epoch, 0, NUM_SAMPLES)
    assert len(served.sizes) <= 1.01 * 2 * (NUM_SAMPLES // 8 + num_blobs)
    assert served.heads == 0, "a blob was looked at before it was read"
