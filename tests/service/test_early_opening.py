"""A dataset that is opened ahead of its job: once, for one taker, and closed when nobody takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from refill.errors import DatasetNotFound, MemoryTooSmall
from refill_service.datasets import early_opening
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.early_opening import EarlyOpening
from refill_service.datasets.index_room import IndexRoom
from refill_service.datasets.pack import pack


class FakeDataset:
    num_samples = 7

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.loads_ahead = False

    def load_ahead(self) -> None:
        self.loads_ahead = True

    async def loaded_ahead(self) -> None:
        """Nothing is."""

    async def close(self) -> None:
        self.closed.set()


class Store:
    """Opens datasets when it is let; notes what it opened."""

    def __init__(self) -> None:
        self.opened: list[FakeDataset] = []
        self.go = asyncio.Event()
        self.has_opened = asyncio.Event()
        self.missing = False

    async def open(self, url: str, version: str) -> Dataset:
        await self.go.wait()
        if self.missing:
            raise DatasetNotFound("no dataset there", url=url)
        self.opened.append(FakeDataset())
        self.has_opened.set()
        return cast(Dataset, self.opened[-1])


def run(work: Callable[[Store, EarlyOpening], Awaitable[Any]]) -> None:
    async def with_store() -> None:
        store = Store()
        opening = EarlyOpening(store.open)
        await work(store, opening)
        await opening.close()

    asyncio.run(with_store())


def test_two_that_take_it_at_once_have_one_each() -> None:
    """A live job and a planned one are registered side by side."""

    async def work(store: Store, opening: EarlyOpening) -> None:
        opening.begin("s3://b/data")
        taking = [asyncio.create_task(opening.take("s3://b/data")) for _ in range(2)]
        await asyncio.sleep(0)
        store.go.set()
        first, second = [cast(FakeDataset, found) for found in await asyncio.gather(*taking)]
        assert first is not second, "the one that ends first would close what the other reads"
        await opening.close()
        assert not first.closed.is_set()
        assert not second.closed.is_set()

    run(work)


def test_two_that_take_what_is_not_there_are_both_told() -> None:
    async def work(store: Store, opening: EarlyOpening) -> None:
        store.missing = True
        taking = [asyncio.create_task(opening.take("s3://b/data")) for _ in range(2)]
        await asyncio.sleep(0)
        store.go.set()
        found = await asyncio.gather(*taking, return_exceptions=True)
        assert [type(each) for each in found] == [DatasetNotFound] * 2

    run(work)


def test_what_was_begun_is_opened_once_and_belongs_to_who_takes_it() -> None:
    async def work(store: Store, opening: EarlyOpening) -> None:
        opening.begin("s3://b/data")
        taking = asyncio.create_task(opening.take("s3://b/data"))
        await asyncio.sleep(0)
        opening.begin("s3://b/data")  # heard of late
        store.go.set()
        taken = cast(FakeDataset, await taking)
        await opening.close()
        assert store.opened == [taken]
        assert not taken.closed.is_set()
        assert await opening.take("s3://b/data") is not taken

    run(work)


def test_who_gives_up_in_the_moment_in_which_it_opens_leaves_nothing_open() -> None:
    async def work(store: Store, opening: EarlyOpening) -> None:
        opening.begin("s3://b/data")
        opened = opening._begun["s3://b/data"]  # noqa: SLF001
        taking = asyncio.create_task(opening.take("s3://b/data"))
        await asyncio.sleep(0)
        opened.add_done_callback(lambda _: taking.cancel())
        store.go.set()
        with pytest.raises(asyncio.CancelledError):
            await taking
        await asyncio.wait_for(store.opened[0].closed.wait(), 60)
        assert await opening.take("s3://b/data") is not cast(Any, store.opened[0])

    run(work)


@pytest.mark.parametrize("whole", [True, False])
def test_all_records_are_loaded_ahead_where_each_pod_will_want_them(whole: bool) -> None:
    async def work(store: Store, opening: EarlyOpening) -> None:
        opening.begin("s3://b/data", whole=whole)
        store.go.set()
        await opening.take("s3://b/data")
        assert store.opened[0].loads_ahead == whole

    run(work)


def test_records_that_are_loaded_ahead_take_their_room_once(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for number in range(100):
        (files / f"{number:03}.bin").write_bytes(bytes(10))
    url = (tmp_path / "packed").as_uri()

    async def work() -> None:
        await pack(str(files), url)
        room = IndexRoom(0)
        dataset = await Dataset.open(url, room=room)
        head_bytes = room.used_bytes
        dataset.load_ahead()
        await asyncio.sleep(0)
        records_bytes = room.used_bytes - head_bytes
        assert records_bytes > 0
        room.limit_bytes = room.used_bytes
        dataset.check_room(100)
        assert len(await dataset.load_records(0, 100)) == 100
        assert room.used_bytes == head_bytes + records_bytes
        dataset.load_ahead()
        with pytest.raises(MemoryTooSmall):
            await dataset.load_records(0, 100)
        dataset.load_ahead()  # nobody wants them
        await dataset.close()
        assert room.used_bytes == 0

    asyncio.run(work())


def test_what_nobody_takes_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_opening, "_KEPT_SECONDS", 0)

    async def work(store: Store, opening: EarlyOpening) -> None:
        opening.begin("s3://b/data")
        store.go.set()
        await store.has_opened.wait()
        await store.opened[0].closed.wait()
        assert await opening.take("s3://b/data") is store.opened[1]

    run(work)


def test_closing_ends_what_is_being_opened_and_closes_what_is_open() -> None:
    async def work(store: Store, opening: EarlyOpening) -> None:
        opening.begin("s3://b/never")
        await asyncio.sleep(0)
        await opening.close()
        assert store.opened == []
        opening.begin("s3://b/data")
        store.go.set()
        await store.has_opened.wait()
        await opening.close()
        assert store.opened[0].closed.is_set()

    run(work)


def test_who_takes_gets_the_error_and_the_next_one_tries_again() -> None:
    async def work(store: Store, opening: EarlyOpening) -> None:
        store.missing = True
        store.go.set()
        opening.begin("s3://b/data")
        with pytest.raises(DatasetNotFound):
            await opening.take("s3://b/data")
        store.missing = False
        assert await opening.take("s3://b/data") is store.opened[0]

    run(work)


def test_who_asks_for_the_length_takes_nothing() -> None:
    async def work(store: Store, opening: EarlyOpening) -> None:
        store.go.set()
        assert await opening.dataset("s3://b/data") is await opening.dataset("s3://b/data")
        assert await opening.take("s3://b/data") is store.opened[0]
        assert len(store.opened) == 1
        store.missing = True
        waiting = [opening.dataset("s3://b/data"), opening.dataset("s3://b/data"), opening.take("s3://b/data")]
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in errors] == [DatasetNotFound] * 3
        store.missing = False
        assert (await opening.dataset("s3://b/data")).num_samples == 7

    run(work)
