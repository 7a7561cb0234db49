"""When may a pod answer? Here one that is alone; what several decide is in tests/cache_core/test_pod_lives.py."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import trustme
from pyreqwest.exceptions import ConnectTimeoutError

from refill.errors import PodUnreachable
from refill.protocol.pod_life import PodLife
from refill_service.cache_core import pod_lives
from refill_service.cache_core.pod_lives import PodLives
from refill_service.peers.certificates import Certificates
from refill_service.peers.fence import Fence
from refill_service.peers.lease_clock import lease_time
from refill_service.peers.peers import Peers


@pytest.mark.parametrize("own_urls", [(), ("http://127.0.0.1:9",)], ids=["told of no URL", "its own leads nowhere"])
def test_a_pod_that_is_alone_answers(own_urls: tuple[str, ...]) -> None:
    """`refill serve` without any URL, as the README shows it, failed at its first batch."""

    async def confirmed() -> None:
        lives = _of_one()
        peers = Peers(own_urls, 1, lives=lives)
        try:
            await Fence(lives, peers).confirm()
        finally:
            await peers.close()

    asyncio.run(confirmed())


def test_a_pod_that_can_not_be_reached_in_time_is_unreachable() -> None:
    """The library's error is a TimeoutError, too, as that of a request which is broken off."""

    async def ask() -> None:
        peers = Peers(("http://127.0.0.1:9",), 1)
        with pytest.raises(PodUnreachable, match="can't be reached within 2 s"):
            async with peers._translated(0):
                raise ConnectTimeoutError("connection timeout", {"causes": []})

    asyncio.run(ask())


class _PeersOfOne(Peers):
    """Its own name takes a while to be asked."""

    def __init__(self, lives: PodLives, *, seconds: float, leads_here: bool) -> None:
        super().__init__(("http://127.0.0.1:9",), 1, lives=lives)
        self.times_asked = 0
        self._seconds = seconds
        self._leads_here = leads_here

    async def who_is(self, pod: int) -> PodLife | None:
        self.times_asked += 1
        await asyncio.sleep(self._seconds)
        if not self._leads_here:
            raise PodUnreachable("no such name", pod=pod)
        return None if self.lives is None else self.lives.own


def _of_one() -> PodLives:
    return PodLives(0, 1, PodLife(100, "a"), lease_time())


def test_many_that_wait_are_asked_for_once() -> None:
    """A question takes a connection of its own, some 10 ms of the event loop; there may be as many as ranks."""

    async def ask() -> int:
        lives = _of_one()
        peers = _PeersOfOne(lives, seconds=0.02, leads_here=True)
        fence = Fence(lives, peers)
        await asyncio.gather(*(fence.confirm() for _ in range(50)))
        return peers.times_asked

    assert asyncio.run(ask()) == 1


def test_a_pod_that_is_alone_answers_though_its_name_fails_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_lives, "LEASE_SECONDS", 0.2)

    async def confirmed() -> None:
        lives = _of_one()
        await Fence(lives, _PeersOfOne(lives, seconds=0.3, leads_here=False)).confirm()

    asyncio.run(confirmed())


def test_a_pod_that_is_alone_answers_though_its_name_is_found_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answered 503 to each batch when that took longer than what it had asked for lasts."""
    monkeypatch.setattr(pod_lives, "LEASE_SECONDS", 0.2)

    async def confirmed() -> None:
        lives = _of_one()
        await Fence(lives, _PeersOfOne(lives, seconds=0.3, leads_here=True)).confirm()

    asyncio.run(confirmed())


def test_a_pod_that_is_alone_asks_before_its_confirmation_ends(clock: list[float]) -> None:
    """Batches do not wait each second for a name that is found slowly."""

    async def ask() -> None:
        lives = _of_one()
        peers = _PeersOfOne(lives, seconds=0, leads_here=True)
        fence = Fence(lives, peers)
        await fence.confirm()
        for asked in (1, 2, 3):
            await fence.confirm()
            assert peers.times_asked == asked
            clock[0] += 0.6
            await fence.confirm()
            assert peers.times_asked == asked, "the batch waits for it"
            assert fence._renewing is not None
            await fence._renewing
        await fence.close()

    asyncio.run(ask())


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no second clock")
def test_a_pod_whose_machine_was_suspended_asks_first(clock: list[float]) -> None:
    """time.monotonic() stands still meanwhile: what was confirmed before seemed to hold."""

    async def ask() -> None:
        lives = _of_one()
        peers = _PeersOfOne(lives, seconds=0, leads_here=True)
        fence = Fence(lives, peers)
        await fence.confirm()
        clock[0] += 3600
        await fence.confirm()
        assert peers.times_asked == 2

    asyncio.run(ask())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the machine's clock says that counts while it is suspended; the other one goes on by itself."""
    now = [1000.0]
    monkeypatch.setattr(time, "clock_gettime", lambda clock: now[0] if clock == time.CLOCK_BOOTTIME else 0.0)
    return now


def test_certificates_that_are_being_replaced_make_a_pod_unreachable(tmp_path: Path) -> None:
    """Else the task that looks for a successor ended with it."""
    authority = trustme.CA()
    shown = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca")
    shown.private_key_pem.write_to_path(tmp_path / "key")
    shown.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    files = Certificates(tmp_path / "cert", tmp_path / "key", tmp_path / "ca")
    files.key.unlink()

    async def ask() -> None:
        with pytest.raises(PodUnreachable, match="can't be read"):
            await Peers(("https://127.0.0.1:9",), 1, certificates=files).who_is(0)

    asyncio.run(ask())
