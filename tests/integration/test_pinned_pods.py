"""Pods with a pinned tier: what they keep is not read from the store again, by any job, and never wrong."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.forked_processes import run_refill
from tests.ordered_cluster import OrderedCluster
from tests.pod_fixtures import NUM_SAMPLES, metric, rank_of, whole_epoch, write_files
from tests.waiting import until

from refill.formats.tar_samples import parse_members
from refill_service.cache_core.policies.interface import Read
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster
from refill_service.jobs.chunk_reader import ChunkReader, ReadChunk
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.pinned_tier import PinnedTier
from refill_service.object_store.store_counters import StoreCounters

Packed = tuple[str, dict[str, bytes]]


def run_epochs(cluster: LocalCluster, packed: Packed, name: str, epochs: int, **more: Any) -> list[dict[str, Any]]:
    """A job of one rank, from registration to its end: the counts of each epoch over all pods."""
    rank = rank_of(cluster, {"name": name, "dataset": packed[0], "num_epochs": epochs} | more)
    counts = []
    for epoch in range(epochs):
        batches = whole_epoch(rank, epoch)
        for batch in batches:
            for sample_id, payload in zip(batch.sample_ids.tolist(), batch.payloads, strict=True):
                key, members = parse_members(payload, sample_id)
                assert bytes(members["bin"]) == packed[1][key], f"sample {sample_id} ({key}) came with other bytes"
        assert len(np.unique(np.concatenate([batch.sample_ids for batch in batches]))) == NUM_SAMPLES
        counts.append(httpx.get(f"{cluster.pod_urls[0]}/v1/jobs/{name}/epochs/{epoch}").json()["total"])
    rank.end_job()
    return counts


def total_of(cluster: LocalCluster, name: str, **labels: str) -> float:
    return sum(metric(url, name, **labels) for url in cluster.pod_urls)


def amplification(counts: dict[str, Any]) -> float:
    return counts["bytes_read"] / (counts["bytes_read"] + counts["bytes_pinned"])


def test_from_the_second_epoch_on_the_store_gives_what_is_not_pinned(packed: Packed, tmp_path: Path) -> None:
    settings = {"memory_bytes": "2MiB", "pinned_fraction": 0.25}
    with LocalCluster(2, tmp_path, settings) as cluster:
        dataset_bytes = rank_of(cluster, {"name": "look", "dataset": packed[0]}).info()["total_bytes"]
        pinned = 2 * 0.25 * 2**21 / dataset_bytes
        first, second, third = run_epochs(cluster, packed, "job", 3, chunk_size=8)
        # Two pods: at each, a chunk of 8 at the end of what fits is not kept. And what the end of an epoch and the
        # beginning of the next want is read for one of them.
        little = 2 * 8 * 4000 / dataset_bytes
        assert amplification(first) == pytest.approx(1, abs=little)
        for later in (second, third):
            assert amplification(later) == pytest.approx(1 - pinned, abs=2 * little)
        assert total_of(cluster, "refill_resident_bytes", kind="pinned") <= 2 * 0.25 * 2**21


LIVE = [{"policy": "redox", "chunk_size": size} for size in (8, 20, 16)]
PLANNED: list[dict[str, Any]] = [{"chunk_size": 8, "seed": seed} for seed in (0, 1)]


@pytest.mark.parametrize("jobs", [LIVE, PLANNED], ids=["of live policies, with other chunk sizes", "planned"])
def test_another_job_finds_it(packed: Packed, tmp_path: Path, jobs: list[dict[str, Any]]) -> None:
    with LocalCluster(2, tmp_path, {"memory_bytes": "8MiB", "pinned_fraction": 0.5}) as cluster:
        # What the first batches want of a chunk is read once more with all of it, perhaps from memory by then.
        assert amplification(run_epochs(cluster, packed, "first", 1, **jobs[0])[0]) == pytest.approx(1, abs=0.03)
        before = total_of(cluster, "refill_store_bytes_total", operation="read_range")
        for number, job in enumerate(jobs[1:]):
            assert amplification(run_epochs(cluster, packed, f"job-{number}", 1, **job)[0]) < 0.05
        read = total_of(cluster, "refill_store_bytes_total", operation="read_range") - before
        assert read < 300_000, "the dataset was read from the store again"


@pytest.mark.parametrize("read_seed", [None, 0])
def test_jobs_at_the_same_time_read_the_store_once(packed: Packed, tmp_path: Path, read_seed: int | None) -> None:
    """Four jobs with the same seed want the same chunks at the same moment."""
    with LocalCluster(1, tmp_path, {"memory_bytes": "32MiB", "pinned_fraction": 0.3}) as cluster:
        counts: list[dict[str, Any]] = []
        jobs = [
            threading.Thread(
                target=lambda name=name: counts.extend(
                    run_epochs(cluster, packed, name, 2, chunk_size=8, memory_bytes=3_000_000, read_seed=read_seed)
                )
            )
            for name in ("a", "b", "c", "d")
        ]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join(60)
        assert len(counts) == 8
        dataset_bytes = max(each["bytes_read"] + each["bytes_pinned"] + each["bytes_shared"] for each in counts)
        assert sum(each["bytes_read"] for each in counts) < 1.2 * dataset_bytes


def test_the_disk_tier_survives_a_restart_and_its_damage_is_read_again(packed: Packed, tmp_path: Path) -> None:
    folder = tmp_path / "nvme"
    settings = {"memory_bytes": "2MiB", "pinned_fraction": 0, "pinned_dir": str(folder), "pinned_dir_bytes": "16MiB"}
    with LocalCluster(1, tmp_path, settings) as cluster:
        first, second = run_epochs(cluster, packed, "first", 2, chunk_size=8)
        # What the first batches want of a chunk is read once more with all of it, perhaps from the disk by then.
        assert amplification(first) + amplification(second) == pytest.approx(1, abs=0.03)
        assert amplification(second) < 0.05, "more than the beginning was read ahead for it, or all of it again"
        cluster.kill(0)
        (file,) = folder.glob("*.pinned")
        with file.open("r+b") as opened:
            for place in (10_000, file.stat().st_size // 2):
                opened.seek(place)
                opened.write(b"not what was written")
            opened.truncate(file.stat().st_size - 100_000)
        cluster.restart(0)
        again, after = run_epochs(cluster, packed, "second", 2, chunk_size=8)
        assert 0 < amplification(again) < 0.2, "only what was damaged or cut off is read again"
        assert amplification(after) < 0.02, "what was damaged was not kept anew"
        assert metric(cluster.pod_urls[0], "refill_pinned_damaged_samples_total") >= 2
        assert "damaged; read again" in cluster.log(0)


def test_two_pods_can_not_share_a_folder(tmp_path: Path) -> None:
    settings = {"pinned_dir": str(tmp_path / "nvme"), "pinned_dir_bytes": "16MiB"}
    with LocalCluster(1, tmp_path, settings):
        arguments = ["serve", "--port", "1", "--peer-port", "2", "--pinned-dir", settings["pinned_dir"]]
        arguments += ["--drain-seconds", "0", "--grace-seconds", "0.2"]
        second = run_refill([*arguments, "--pinned-dir-bytes", "16MiB"])
    assert second.returncode != 0
    waits, refused = second.stderr.strip().splitlines()
    assert "is used by another pod: waiting up to 0.2 s for its end" in waits
    assert "is used by another pod: give each pod a folder of its own" in refused


def test_a_pod_waits_for_the_one_before_it_to_leave_its_folder(tmp_path: Path) -> None:
    """Kubernetes starts it at once after `kubectl delete pod --force`. A start that fails would be tried again only
    after a pause of 10 s, then 20, ... A second one that waits ends when it is told to."""
    settings = {"pinned_dir": str(tmp_path / "nvme"), "pinned_dir_bytes": "16MiB", "drain_seconds": "0"}
    with OrderedCluster(1, tmp_path, settings) as cluster:
        cluster.pause(0)
        before = cluster.replace(0)
        try:
            until(lambda: "is used by another pod: waiting up to 25 s" in cluster.log(0), "the word that it waits")
            cluster.processes[0].terminate()
            assert cluster.processes[0].wait(10) == 0, (
                "without a handler a signal is lost on a container's first process"
            )
            cluster.restart(0, wait=False)
            until(lambda: cluster.log(0).count("is used by another pod: waiting") == 2, "the next one's word")
        finally:
            before.kill()
            before.wait()
        until(lambda: "pod 0 of 1: clients on" in cluster.log(0).rpartition("waiting up to")[2], "the start")
        assert cluster.processes[0].poll() is None


def test_a_dataset_that_was_packed_anew_is_read_anew(tmp_path: Path) -> None:
    """The same address, other bytes: nothing of the old dataset is served."""
    settings = {"memory_bytes": "16MiB", "pinned_fraction": 0.5}
    with LocalCluster(1, tmp_path, settings) as cluster:
        for seed in (1, 2):
            files = tmp_path / f"files-{seed}"
            files.mkdir()
            content = write_files(files, NUM_SAMPLES, seed=seed)
            url = (tmp_path / "store").as_uri()
            asyncio.run(pack(str(files), url, force=seed > 1))
            run_epochs(cluster, (url, content), f"job-{uuid.uuid4().hex[:4]}", 2)


def test_what_others_have_read_since_a_read_was_ordered_is_not_read_again(packed: Packed) -> None:
    """A read of many chunks ahead waits until ranks have their first batches. Meanwhile another job has read one of the
    chunks, and reads one still."""

    async def run() -> None:
        counters = StoreCounters()
        dataset = await Dataset.open(packed[0], counters=counters)
        records = await dataset.load_records(0, dataset.num_samples)
        tier = PinnedTier(2 * dataset.index.sample_bytes)
        share = ChunkLayout(dataset.blobs.first_sample, 8).share(0, 1)
        ours, theirs = (
            ChunkReader(dataset, records, share, ByteGate(10**6), tier.lease("here", records)) for _ in range(2)
        )
        reads = [Read(first, first + 8, np.arange(first, first + 8)) for first in (16, 24, 32, 40)]
        (ahead,) = ours.together(reads)
        came: list[ReadChunk] = []
        (before,), (now,) = theirs.together([reads[0]]), theirs.together([reads[2]])
        await theirs.read(before, came.append)
        counters.operations["read_range"].bytes = 0
        async with asyncio.timeout(60):
            ahead_read = asyncio.create_task(ours.read(ahead, came.append))
            await asyncio.sleep(0)
            await theirs.read(now, came.append)
            await ahead_read
        assert {(chunk.read.first, chunk.pinned) for chunk in came[1:]} == {
            (16, True), (24, False), (32, False), (32, True), (40, False),
        }  # fmt: skip
        wanted = sum(int(records.length[read.first : read.end].sum()) for read in reads[1:])
        assert counters.operations["read_range"].bytes == wanted
        await dataset.close()

    asyncio.run(run())


def test_a_chunk_that_two_epochs_want_is_read_once(packed: Packed) -> None:
    """The end of one, and the beginning of the next."""

    async def run() -> None:
        counters = StoreCounters()
        dataset = await Dataset.open(packed[0], counters=counters)
        records = await dataset.load_records(0, dataset.num_samples)
        pinned = PinnedTier(2 * dataset.index.sample_bytes).lease("here", records)
        share = ChunkLayout(dataset.blobs.first_sample, 8).share(0, 1)
        reader = ChunkReader(dataset, records, share, ByteGate(10**6), pinned)
        groups = reader.together([Read(16, 24, np.arange(16, 24)) for _ in range(2)])
        counters.operations["read_range"].requests = 0
        came: list[ReadChunk] = []

        async with asyncio.timeout(60):
            await asyncio.gather(*(reader.read(group, came.append) for group in groups))
        assert [chunk.pinned for chunk in came] == [False, True]
        assert counters.operations["read_range"].requests == 1
        await dataset.close()

    asyncio.run(run())


def test_nobody_waits_for_reads_of_others_that_wait_at_the_gate(packed: Packed) -> None:
    """They may be of a job that reads far ahead. Once they are past the gate, they find what came meanwhile."""

    async def run() -> None:
        counters = StoreCounters()
        dataset = await Dataset.open(packed[0], counters=counters)
        records = await dataset.load_records(0, dataset.num_samples)
        tier, full = PinnedTier(2 * dataset.index.sample_bytes), ByteGate(10**6)
        share = ChunkLayout(dataset.blobs.first_sample, 8).share(0, 1)
        behind, first = (
            ChunkReader(dataset, records, share, gate, tier.lease("here", records)) for gate in (full, ByteGate(10**6))
        )
        wanted = Read(16, 24, np.arange(16, 24))
        came: list[ReadChunk] = []
        counters.operations["read_range"].requests = 0
        async with asyncio.timeout(60):
            async with full.passage(10**6):
                waiting = asyncio.create_task(behind.read([wanted], came.append))
                await asyncio.sleep(0)
                await first.read([wanted], came.append)
            await waiting
        assert [chunk.pinned for chunk in came] == [False, True]
        assert counters.operations["read_range"].requests == 1
        await dataset.close()

    asyncio.run(run())


@pytest.mark.parametrize("steps", range(6))
def test_nobody_waits_for_reads_of_a_job_that_has_ended(packed: Packed, steps: int) -> None:
    """Whether they had begun or not."""

    async def run() -> None:
        dataset = await Dataset.open(packed[0])
        records = await dataset.load_records(0, dataset.num_samples)
        tier = PinnedTier(2 * dataset.index.sample_bytes)
        share = ChunkLayout(dataset.blobs.first_sample, 8).share(0, 1)
        ends, goes_on = (
            ChunkReader(dataset, records, share, ByteGate(10**6), tier.lease("here", records)) for _ in range(2)
        )
        reads = [Read(first, first + 8, np.arange(first, first + 8)) for first in (16, 32, 64)]
        reading = asyncio.create_task(ends.read(reads, lambda chunk: None))
        for _ in range(steps):
            await asyncio.sleep(0)
        reading.cancel()
        came: list[ReadChunk] = []
        async with asyncio.timeout(60):
            await goes_on.read(reads, came.append)
        assert sorted(chunk.read.first for chunk in came) == [16, 32, 64]
        await dataset.close()

    asyncio.run(run())


def test_what_the_disk_is_still_taking_is_waited_for(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not read from the store again; also where the chunk was read ahead while ranks waited for others."""
    go_on = threading.Event()
    write = os.pwrite

    def slow_write(*arguments: Any) -> int:
        assert go_on.wait(60)
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", slow_write)

    async def run() -> None:
        dataset = await Dataset.open(packed[0])
        records = await dataset.load_records(0, dataset.num_samples)
        pinned = PinnedTier(0, tmp_path / "nvme", dataset.index.sample_bytes).lease("here", records)
        share = ChunkLayout(dataset.blobs.first_sample, 8).share(0, 1)
        reader = ChunkReader(dataset, records, share, ByteGate(10**6), pinned)
        wanted = Read(16, 24, np.arange(16, 24))
        came: list[ReadChunk] = []
        has_come = asyncio.Event()

        def arrived(chunk: ReadChunk) -> None:
            came.append(chunk)
            has_come.set()

        async with asyncio.timeout(60):
            (first,) = reader.together([wanted])
            reading = asyncio.create_task(reader.read(first, arrived))
            await has_come.wait()
            (again,) = reader.together([wanted])
            go_on.set()
            await reader.read(again, arrived)
            await reading
        assert [chunk.pinned for chunk in came] == [False, True]
        await dataset.close()

    asyncio.run(run())
