"""The pinned tier keeps a prefix of a share, verified, within its limits, and gives way when nobody uses it."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import until_in_loop

from refill.errors import InvalidInput
from refill_service.cache_core.dataset_index import Int64Array, SampleRecords, sample_checksum
from refill_service.cache_core.record_pieces import RecordPieces, Records
from refill_service.memory.pinned_tier import PinnedFile, PinnedMemory, PinnedShare, PinnedTier

COUNT, SIZE = 100, 1000


def dataset(seed: int, first: int = 0) -> tuple[SampleRecords, list[bytes]]:
    data = [random.Random(f"{seed} {i}").randbytes(SIZE) for i in range(COUNT)]
    checksums = np.array([sample_checksum(payload) for payload in data], dtype=np.uint64)
    return SampleRecords(first, np.arange(COUNT) * SIZE, np.full(COUNT, SIZE), checksums), data


def keep_all(share: PinnedShare, records: SampleRecords, data: list[bytes], chunk: int = 10) -> None:
    for start in range(0, COUNT, chunk):
        first = records.first_sample + start
        part = share.part_for(first, first + chunk)
        if isinstance(part, PinnedMemory):
            part.put(first, data[start : start + chunk])
        elif isinstance(part, PinnedFile):
            asyncio.run(part.keep(first, data[start : start + chunk]))


def kept(share: PinnedShare, records: SampleRecords, data: list[bytes], chunk: int = 10) -> list[int]:
    """The chunks that come out of the tier, after a check of their bytes."""
    found = []
    for start in range(0, COUNT, chunk):
        first = records.first_sample + start
        part = share.part_for(first, first + chunk)
        if part is not None and (payloads := asyncio.run(part.load(first, first + chunk))) is not None:
            assert [bytes(payload) for payload in payloads] == data[start : start + chunk]
            found.append(start // chunk)
    return found


def test_memory_keeps_what_fits() -> None:
    tier = PinnedTier(25 * SIZE)
    records, data = dataset(1, first=7000)
    share = tier.lease("1", records)
    assert kept(share, records, data) == [], "nothing is there before it was read"
    keep_all(share, records, data)
    assert kept(share, records, data) == [0, 1], "two chunks of ten fit into 25 samples' memory"
    assert tier.used_memory_bytes == 20 * SIZE
    assert kept(share, records, data, chunk=5) == [0, 1, 2, 3], "chunks of another size find the same samples"
    assert tier.lease("1", records) is share, "another job on the dataset shares it"


def test_disk_follows_memory(tmp_path: Path) -> None:
    tier = PinnedTier(20 * SIZE, tmp_path, 30 * SIZE)
    records, data = dataset(1)
    share = tier.lease("1", records)
    keep_all(share, records, data)
    assert kept(share, records, data) == [0, 1, 2, 3, 4]
    assert (tier.used_memory_bytes, tier.used_disk_bytes) == (20 * SIZE, 30 * SIZE)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 30 * SIZE
    tier.close()


def test_disk_outlives_the_pod(tmp_path: Path) -> None:
    records, data = dataset(1)
    for expected in ([], list(range(10))):
        tier = PinnedTier(0, tmp_path, COUNT * SIZE)
        share = tier.lease("1", records)
        assert kept(share, records, data) == expected
        keep_all(share, records, data)
        tier.close()


def test_a_half_written_file_gives_what_is_whole(tmp_path: Path) -> None:
    records, data = dataset(1)
    tier = PinnedTier(0, tmp_path, COUNT * SIZE)
    keep_all(tier.lease("1", records), records, data)
    tier.close()
    (file,) = tmp_path.glob("*.pinned")
    os.truncate(file, 35_500)
    tier = PinnedTier(0, tmp_path, COUNT * SIZE)
    share = tier.lease("1", records)
    assert kept(share, records, data) == [0, 1, 2]
    keep_all(share, records, data)
    assert kept(share, records, data) == list(range(10)), "what was damaged is kept again"
    tier.close()


@pytest.mark.parametrize("seed", range(5))
def test_damaged_bytes_are_never_served(tmp_path: Path, seed: int) -> None:
    records, data = dataset(1)
    tier = PinnedTier(0, tmp_path, COUNT * SIZE)
    share = tier.lease("1", records)
    keep_all(share, records, data)
    (file,) = tmp_path.glob("*.pinned")
    place = random.Random(seed).randrange(COUNT * SIZE)
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    with file.open("r+b") as opened:
        opened.write(content)
    assert kept(share, records, data) == [c for c in range(10) if c != place // (10 * SIZE)]
    assert tier.damaged_samples == 1
    tier.close()


def test_a_file_of_another_dataset_under_this_name_is_not_believed(tmp_path: Path) -> None:
    records, data = dataset(1)
    others = dataset(2)
    tier = PinnedTier(0, tmp_path, COUNT * SIZE)
    keep_all(tier.lease("1", others[0]), *others)
    tier.close()
    tier = PinnedTier(0, tmp_path, COUNT * SIZE)
    assert kept(tier.lease("1", records), records, data) == []
    tier.close()


def test_a_full_disk_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, data = dataset(1)
    tier = PinnedTier(0, tmp_path, COUNT * SIZE)
    share = tier.lease("1", records)
    write, calls = os.pwrite, []

    def full_after_three(file: int, content: memoryview, place: int) -> int:
        calls.append(place)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content, place)

    monkeypatch.setattr(os, "pwrite", full_after_three)
    keep_all(share, records, data)
    assert kept(share, records, data) == [0, 1, 2]
    assert len(calls) == 4, "a full disk is not tried again and again"
    tier.close()


def test_who_is_not_used_gives_way(tmp_path: Path) -> None:
    tier = PinnedTier(50 * SIZE, tmp_path, 50 * SIZE)
    first, second, third = dataset(1), dataset(2), dataset(3)
    share = tier.lease("1", first[0])
    keep_all(share, *first)
    assert kept(tier.lease("2", second[0]), *second) == []
    assert len(kept(share, *first)) == 10, "a dataset that a job uses is not evicted"
    tier.release(share)
    share = tier.lease("3", third[0])
    keep_all(share, *third)
    assert len(kept(share, *third)) == 10
    assert tier.used_memory_bytes <= 50 * SIZE
    assert tier.used_disk_bytes <= 50 * SIZE
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 50 * SIZE
    tier.close()


def test_files_left_by_an_earlier_pod_give_way(tmp_path: Path) -> None:
    first, second = dataset(1), dataset(2)
    tier = PinnedTier(0, tmp_path, COUNT * SIZE)
    keep_all(tier.lease("1", first[0]), *first)
    tier.close()
    tier = PinnedTier(0, tmp_path, COUNT * SIZE)
    share = tier.lease("2", second[0])
    keep_all(share, *second)
    assert len(kept(share, *second)) == 10
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= COUNT * SIZE
    tier.close()


def test_one_pod_a_folder(tmp_path: Path) -> None:
    tier = PinnedTier(0, tmp_path, 1000)
    with pytest.raises(InvalidInput, match=r"pinned_dir .* is used by another pod"):
        PinnedTier(0, tmp_path, 1000)
    tier.close()
    PinnedTier(0, tmp_path, 1000).close()


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match=r"pinned_dir .*/file can't be used: "):
        PinnedTier(0, tmp_path / "file", 1000)


def test_an_empty_share_and_no_memory_at_all() -> None:
    records, _ = dataset(1)
    assert PinnedTier(0).lease("1", records).limit_bytes == 0
    assert PinnedTier(1000).lease("1", records.part(0, 0)).part_for(0, 0) is None


def test_a_share_that_got_little_gets_more_when_there_is_room(tmp_path: Path) -> None:
    tier = PinnedTier(100 * SIZE)
    first, second = dataset(1), dataset(2)
    one = tier.lease("1", first[0])
    other = tier.lease("2", second[0])
    assert (one.limit_bytes, other.limit_bytes) == (100 * SIZE, 0)
    tier.release(one)
    tier.release(other)
    assert tier.lease("2", second[0]).limit_bytes == 100 * SIZE


def test_memory_gives_way_though_there_is_room_on_disk(tmp_path: Path) -> None:
    tier = PinnedTier(100 * SIZE, tmp_path, 1000 * SIZE)
    tier.release(tier.lease("1", dataset(1)[0]))
    assert [part.in_memory for part in tier.lease("2", dataset(2)[0]).parts] == [True]
    tier.close()


def test_a_slow_disk_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refill_service.memory.pinned_tier._MAX_WRITING_BYTES", 15 * SIZE)
    records, data = dataset(1)
    tier = PinnedTier(0, tmp_path, COUNT * SIZE)
    share = tier.lease("1", records)
    go_on, write = threading.Event(), os.pwrite

    def slow_write(*arguments: Any) -> int:
        assert go_on.wait(60)
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", slow_write)

    async def all_at_once() -> None:
        (part,) = share.parts
        assert isinstance(part, PinnedFile)
        keeping = [asyncio.create_task(part.keep(at, data[at : at + 10])) for at in range(0, COUNT, 10)]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*keeping)

    asyncio.run(all_at_once())
    assert len(kept(share, records, data)) == 2, "two chunks of ten are under way when the third comes"
    keep_all(share, records, data)
    assert len(kept(share, records, data)) == 10
    tier.close()


def test_damage_stays_counted(tmp_path: Path) -> None:
    records, data = dataset(1)
    tier = PinnedTier(0, tmp_path, COUNT * SIZE)
    share = tier.lease("1", records)
    keep_all(share, records, data)
    (file,) = tmp_path.glob("*.pinned")
    file.write_bytes(b"x" * COUNT * SIZE)
    kept(share, records, data)
    assert tier.damaged_samples == COUNT
    tier.release(share)
    tier.lease("2", dataset(2)[0])
    assert tier.damaged_samples == COUNT
    tier.close()


class TestWithoutChecksums:
    """Records of an index that was made of headers alone."""

    def records(self, offset: int = 0) -> tuple[SampleRecords, list[bytes]]:
        known, data = dataset(1)
        unknown = np.zeros(COUNT, dtype=np.uint64)
        return SampleRecords(0, known.offset + offset, known.length, unknown, has_checksums=False), data

    def test_jobs_share_the_same_ranges_of_the_same_place(self) -> None:
        tier = PinnedTier(COUNT * SIZE)
        records, data = self.records()
        share = tier.lease("1#versions", records)
        keep_all(share, records, data)
        assert tier.lease("1#versions", self.records()[0]) is share
        assert tier.lease("1#versions", self.records(offset=1)[0]) is not share, "other bytes of the same objects"
        assert tier.lease("1#others", records) is not share, "the same bytes of other versions"
        assert tier.lease("1#versions", dataset(1)[0]) is not share, "checksums prove what these don't"

    def test_disk_is_compared_with_what_was_written(self, tmp_path: Path) -> None:
        records, data = self.records()
        tier = PinnedTier(0, tmp_path, COUNT * SIZE)
        share = tier.lease("1", records)
        keep_all(share, records, data)
        assert kept(share, records, data) == list(range(10))
        (file,) = tmp_path.glob("*.pinned")
        with file.open("r+b") as opened:
            opened.write(b"?")
        assert kept(share, records, data) == list(range(1, 10))
        assert tier.damaged_samples == 1
        tier.close()

    def test_disk_does_not_outlive_the_pod(self, tmp_path: Path) -> None:
        """Nobody can say whether what an earlier pod wrote is intact."""
        records, data = self.records()
        for _ in range(2):
            tier = PinnedTier(0, tmp_path, COUNT * SIZE)
            share = tier.lease("1", records)
            assert kept(share, records, data) == []
            keep_all(share, records, data)
            assert kept(share, records, data) == list(range(10))
            tier.close()


def in_pieces(num_pieces: int, first: int = 0) -> RecordPieces:
    """Of every other ten samples of a byte."""
    firsts = first + 20 * np.arange(num_pieces)
    count = 10 * num_pieces
    columns = np.arange(count), np.ones(count, dtype=np.int64), np.zeros(count, dtype=np.uint64)
    return RecordPieces(firsts, firsts + 10, columns)


@pytest.mark.parametrize(
    ("other", "is_shared"),
    [
        (in_pieces(30), True),
        (in_pieces(7), True),
        (in_pieces(30, first=20), True),
        (in_pieces(30, first=5), True),
        (in_pieces(30, first=10), False),
        (in_pieces(0), False),
        (SampleRecords(5, np.arange(9), np.ones(9, dtype=np.int64), np.zeros(9, dtype=np.uint64)), True),
        (SampleRecords(5, np.arange(9), np.full(9, 2), np.zeros(9, dtype=np.uint64)), False),
        (SampleRecords(5, np.arange(9), np.ones(9, dtype=np.int64), np.arange(9, dtype=np.uint64)), False),
        (SampleRecords(12, np.arange(5), np.ones(5, dtype=np.int64), np.zeros(5, dtype=np.uint64)), False),
    ],
)
def test_jobs_share_as_far_as_the_records_agree_that_both_have(other: Records, is_shared: bool) -> None:
    tier = PinnedTier(1000)
    share = tier.lease("1", in_pieces(30))
    assert (tier.lease("1", other) is share) == is_shared


def test_whether_records_of_many_samples_agree_is_found_in_little_memory() -> None:
    records = in_pieces(100_000)
    share = PinnedShare([PinnedMemory(in_pieces(100_000))], "1")
    tracemalloc.start()
    try:
        assert share.is_of("1", records)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10 * len(records)


class Watched(RecordPieces):
    """Says which threads have looked through all of them."""

    def __init__(self, of: RecordPieces, threads: set[int]) -> None:
        super().__init__(of.first, of.end, (of.offset, of.length, of.checksum))
        self.threads = threads

    def between(self, start: int, stop: int) -> RecordPieces:
        self.threads.add(threading.get_ident())
        return Watched(super().between(start, stop), self.threads)

    def ids(self, start: int, stop: int) -> Int64Array:
        self.threads.add(threading.get_ident())
        return super().ids(start, stop)


def test_a_job_that_comes_has_a_thread_look_through_its_records(tmp_path: Path) -> None:
    """Of ten million samples it took half a second to three, in which a pod answered nobody."""
    threads: set[int] = set()

    async def come() -> None:
        tier = PinnedTier(100, tmp_path, 1000)
        first = await tier.leased("1", Watched(in_pieces(30), threads))
        again = await tier.leased("1", Watched(in_pieces(20), threads))
        assert first is again
        assert first.num_jobs == 2

    asyncio.run(come())
    assert threads
    assert threading.get_ident() not in threads


class Stops(Watched):
    """Whoever looks through them is held up until the test goes on."""

    def __init__(self, of: RecordPieces) -> None:
        super().__init__(of, set())
        self.began, self.goes_on = threading.Event(), threading.Event()

    def between(self, start: int, stop: int) -> RecordPieces:
        self.began.set()
        assert self.goes_on.wait(60)
        return super().between(start, stop)


def test_however_many_jobs_come_they_take_one_thread() -> None:
    """Others plan the orders of epochs."""

    async def come() -> None:
        tier, records = PinnedTier(100), [Stops(in_pieces(30)) for _ in range(8)]
        coming = [asyncio.create_task(tier.leased("1", each)) for each in records]
        assert await asyncio.to_thread(records[0].began.wait, 60), "a thread is left"
        assert not any(each.began.is_set() for each in records[1:])
        for each in records:
            each.goes_on.set()
        assert len(set(await asyncio.gather(*coming))) == 1

    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(2))
    loop.run_until_complete(come())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def test_a_job_that_is_given_up_while_it_comes_holds_nothing() -> None:
    records = Stops(in_pieces(30))

    async def give_up() -> None:
        tier = PinnedTier(100)
        coming = asyncio.create_task(tier.leased("1", records))
        assert await asyncio.to_thread(records.began.wait, 60)
        coming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await coming
        records.goes_on.set()
        share = await tier.leased("1", in_pieces(30))
        await until_in_loop(lambda: share.num_jobs == 1, "what was given up is given back")
        tier.release(share)
        assert share.num_jobs == 0

    asyncio.run(give_up())
