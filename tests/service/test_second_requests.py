"""A request that hangs is made once more, seldom, and only where there is room: over a real S3 server, by counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest
from tests.azurite import ACCOUNT
from tests.conftest import S3Server
from tests.s3_stalls import Asked, Stalls, stalling

from refill_service.memory.byte_gate import ByteGate
from refill_service.object_store.base import ObjectStore
from refill_service.object_store.open_store import open_store
from refill_service.object_store.second_requests import UsualTimes
from refill_service.object_store.store_settings import StoreSettings

SAMPLE_BYTES = 1000
DATA = b"".join(number.to_bytes(4, "big") * (SAMPLE_BYTES // 4) for number in range(1000))
AT_ONCE = 8


def at(sample: int) -> Asked:
    return "data", sample * SAMPLE_BYTES


class Reader:
    """Reads samples of 1,000 bytes, as a pod does."""

    def __init__(self, store: ObjectStore, gate: ByteGate) -> None:
        self.store, self.gate = store, gate

    async def read(self, sample: int) -> None:
        start = sample * SAMPLE_BYTES
        async with self.gate.passage(SAMPLE_BYTES, "job") as room:
            found = await self.store.read_range("data", start, start + SAMPLE_BYTES, room)
        assert found == DATA[start : start + SAMPLE_BYTES]

    async def read_all(self, samples: range, at_once: int = AT_ONCE) -> None:
        left = iter(samples)

        async def read_some() -> None:
            for sample in left:
                await self.read(sample)

        await asyncio.gather(*(read_some() for _ in range(at_once)))

    @property
    def seconds_and_won(self) -> tuple[int, int]:
        return self.store.counters.second_reads, self.store.counters.second_reads_won


@pytest.fixture
def stalls(s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stalls]:
    with stalling(s3_environment.endpoint_url) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        yield found


def on_store(s3: S3Server, work: Callable[[Reader], Awaitable[None]], gate: ByteGate | None = None) -> None:
    url = f"s3://{s3.new_bucket()}/prefix"

    async def run() -> None:
        store = open_store(url, StoreSettings.from_environment())
        try:
            await store.write("data", DATA)
            made = ByteGate(100 * SAMPLE_BYTES, limit_visitors=32) if gate is None else gate
            await asyncio.wait_for(work(Reader(store, made)), 90)
            assert (made.used_bytes, made.inside_bytes) == (0, 0)
        finally:
            await store.close()

    asyncio.run(run())


def test_of_1000_reads_1_in_300_hangs_for_ever_and_all_bytes_come(s3_environment: S3Server, stalls: Stalls) -> None:
    stalls.hangs = lambda asked, time: asked in (at(150), at(450), at(750)) and time == 1

    async def work(reader: Reader) -> None:
        await reader.read_all(range(1000))
        seconds, won = reader.seconds_and_won
        assert 1000 + won <= stalls.requests.total() <= 1000 + seconds
        assert won >= 3
        assert seconds <= 20
        assert all(stalls.requests[at(sample)] == 2 for sample in (150, 450, 750))
        assert reader.store.counters.operations["read_range"].requests == 1000, "a read was counted twice"

    on_store(s3_environment, work)


def test_reads_that_hang_one_after_the_other_come_though_nothing_else_is_read(
    s3_environment: S3Server, stalls: Stalls
) -> None:
    """As with a pod whose memory is full of what waits for them."""
    stalls.hangs = lambda asked, time: asked in (at(40), at(41)) and time == 1

    async def work(reader: Reader) -> None:
        await reader.read_all(range(40))
        async with asyncio.timeout(30):  # less than a request's own limit
            await asyncio.gather(reader.read(40), reader.read(41))
        assert reader.seconds_and_won[1] >= 2

    on_store(s3_environment, work)


@pytest.mark.variants("hf")
@pytest.mark.parametrize(
    "scheme", ["az", "hf", *(pytest.param(scheme, marks=pytest.mark.variant) for scheme in ("gs", "http"))]
)
def test_other_stores_are_asked_again_likewise(
    scheme: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if scheme == "gs":
        server = request.getfixturevalue("gcs_environment")
        upstream, url = server.endpoint_url, f"gs://{server.new_bucket()}"
    elif scheme == "az":
        server = request.getfixturevalue("azure_environment")
        upstream, url = server.endpoint_url.removesuffix(f"/{ACCOUNT}"), f"az://{server.new_container()}"
    else:
        server = request.getfixturevalue("hub" if scheme == "hf" else "web")
        server.large_bytes = len(DATA)  # the Hub has it itself
        server.put("data", DATA)
        upstream, url = server.url, "hf://datasets/some/pictures"
    with stalling(upstream) as stalls:
        stalls.hangs = lambda asked, time: asked == at(150) and time == 1
        variable, value = {
            "gs": ("GOOGLE_BASE_URL", stalls.url),
            "az": ("AZURE_STORAGE_ENDPOINT", f"{stalls.url}/{ACCOUNT}"),
            "hf": ("HF_ENDPOINT", stalls.url),
            "http": ("UNUSED", ""),
        }[scheme]
        monkeypatch.setenv(variable, value)

        async def run() -> None:
            store = open_store(stalls.url if scheme == "http" else url, StoreSettings.from_environment())
            if scheme in ("gs", "az"):
                await store.write("data", DATA)
            reader = Reader(store, ByteGate(100 * SAMPLE_BYTES, limit_visitors=32))
            await asyncio.wait_for(reader.read_all(range(300)), 90)
            assert stalls.requests[at(150)] == 2
            assert reader.seconds_and_won[1] >= 1
            await store.close()

        asyncio.run(run())


def test_a_store_that_is_slow_as_a_whole_gets_no_more_than_the_budget(s3_environment: S3Server, stalls: Stalls) -> None:
    slow = threading.Event()

    def hangs(asked: Asked, time: int) -> bool:
        slow.wait(0.0 if asked < at(200) else 0.1)
        return False

    stalls.hangs = hangs

    async def work(reader: Reader) -> None:
        await reader.read_all(range(200))
        await reader.read_all(range(200, 600))
        seconds, _ = reader.seconds_and_won
        assert seconds <= 0.02 * 600
        assert 600 <= stalls.requests.total() <= 600 + seconds

    on_store(s3_environment, work)


def test_none_while_as_many_requests_are_under_way_as_may_be(s3_environment: S3Server, stalls: Stalls) -> None:
    stalls.hangs = lambda asked, time: asked == at(200)

    def refuses(asked: Asked, time: int) -> bool:
        if asked == at(400):
            stalls.goes_on.set()
        return False

    stalls.refuses = refuses

    async def work(reader: Reader) -> None:
        await reader.read_all(range(500), at_once=2 * AT_ONCE)
        assert stalls.requests[at(200)] == 1

    on_store(s3_environment, work, ByteGate(100 * SAMPLE_BYTES, limit_visitors=AT_ONCE))


def test_both_count_while_both_are_under_way_and_who_gives_up_leaves_nothing(
    s3_environment: S3Server, stalls: Stalls
) -> None:
    stalls.hangs = lambda asked, time: asked == at(200)

    async def work(reader: Reader) -> None:
        await reader.read_all(range(200))
        before, _ = reader.seconds_and_won
        for ends in ("is given up", "comes"):
            reading = asyncio.create_task(reader.read(200))
            while reader.gate.used_bytes != 2 * SAMPLE_BYTES:
                await reader.read(0)  # each read earns a part of a second request
            assert reader.gate.inside_bytes == 2 * SAMPLE_BYTES
            if ends == "is given up":
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                assert reader.gate.used_bytes == 0
                await reader.read_all(range(100))
            else:
                stalls.goes_on.set()
                await reading
        assert reader.seconds_and_won[0] >= before + 2

    on_store(s3_environment, work)


def test_a_store_that_refuses_a_second_request_gets_no_other_for_some_time(
    s3_environment: S3Server, stalls: Stalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not tried again either: the first one is, as ever."""
    monkeypatch.setenv("REFILL_STORE_MAX_BACKOFF_SECONDS", "1000")
    refused = threading.Event()
    stalls.hangs = lambda asked, time: asked in (at(200), at(400)) and time == 1

    def refuses(asked: Asked, time: int) -> bool:
        if asked == at(200) and time == 2:
            refused.set()
            return True
        return False

    stalls.refuses = refuses

    async def work(reader: Reader) -> None:
        await reader.read_all(range(200))
        reading = [asyncio.create_task(reader.read(200))]
        while not refused.is_set():
            await reader.read(0)  # each read earns a part of a second request
        reading.append(asyncio.create_task(reader.read(400)))
        await reader.read_all(range(401, 1000))
        stalls.goes_on.set()
        await asyncio.gather(*reading)
        assert stalls.requests[at(200)] == 2
        assert stalls.requests[at(400)] == 1

    on_store(s3_environment, work)


def test_what_reads_usually_take_is_known_by_their_size() -> None:
    times = UsualTimes()
    assert times.usual_seconds(1000) is None
    for number in range(100):
        times.took(1000, 0.001 * (1 + number % 10))
    assert times.usual_seconds(1000) == times.usual_seconds(900) == 0.01
    assert times.usual_seconds(10) == 0.01, "smaller ones take no longer"
    assert times.usual_seconds(16_000) == pytest.approx(0.16), "larger ones may take as much longer as they are larger"
    for _ in range(100):
        times.took(16_000, 0.02)
    assert times.usual_seconds(16_000) == 0.02
    for _ in range(1000):
        times.took(1000, 0.5)
    assert times.usual_seconds(1000) == 0.5, "what was a while ago does not count"
