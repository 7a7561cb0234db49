"""What the Hub is asked, and how often: by counts, at a server of our own that answers as it does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.web_files import Hub, WebFiles

from refill.errors import InvalidInput, RefillError, StoreDenied, StoreNotFound, StoreUnavailable
from refill_service.object_store.base import ObjectReplaced, ObjectStore
from refill_service.object_store.open_store import open_store
from refill_service.object_store.store_settings import StoreSettings

LARGE = bytes(range(256)) * 10


def on_hub(hub: Hub, work: Callable[[ObjectStore], Awaitable[Any]], folder: str = "data", **settings: Any) -> Any:
    async def run() -> Any:
        store = open_store(f"hf://datasets/{hub.dataset}/{folder}", StoreSettings.from_environment(**settings))
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


async def listed(store: ObjectStore) -> list[str]:
    return [each.key async for each in store.list()]


def said(hub: Hub, kind: type[RefillError], **settings: Any) -> str:
    with pytest.raises(kind) as raised:
        on_hub(hub, lambda store: store.read_range("x", 0, 1), max_retries=0, **settings)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_it_is_asked_once_a_file_however_often_the_file_is_read(hub: Hub) -> None:
    for name in "abc":
        hub.put(f"data/{name}", LARGE)

    async def work(store: ObjectStore) -> None:
        reads = [store.read_range(name, start, start + 100) for start in range(0, 2500, 50) for name in "abc"]
        found = await asyncio.gather(*reads)
        assert all(bytes(each) == LARGE[place // 3 * 50 : place // 3 * 50 + 100] for place, each in enumerate(found))
        assert hub.resolved == {"data/a": 1, "data/b": 1, "data/c": 1}
        assert len(hub.stored.asked) == 150

    on_hub(hub, work)


def test_a_url_that_expired_is_asked_for_again(hub: Hub) -> None:
    hub.put("data/x", LARGE)

    async def work(store: ObjectStore) -> None:
        for epoch in range(3):
            for start in range(0, 500, 100):
                assert await store.read_range("x", start, start + 100) == LARGE[start : start + 100]
            assert hub.resolved["data/x"] == epoch + 1
            hub.expire()
        hub.stored.says = lambda path, headers: (403, {}, b"")
        with pytest.raises(StoreDenied):
            await store.read_range("x", 0, 100)
        assert hub.resolved["data/x"] == 4

    on_hub(hub, work)


def test_who_opens_a_dataset_sees_what_it_is_now(hub: Hub) -> None:
    hub.put("data/x", LARGE)

    async def work(store: ObjectStore) -> None:
        before = await store.etag("x")
        assert await store.read_start("x", 10) == (LARGE[:10], len(LARGE))
        hub.put("data/x", LARGE[::-1])
        # The signed URL is that of the file that was there.
        assert await store.read_version("x", 0, 10, etag=before) == (LARGE[:10], before)
        assert await store.read_start("x", 10) == (LARGE[::-1][:10], len(LARGE))
        with pytest.raises(ObjectReplaced):
            await store.read_version("x", 0, 10, etag=before)

    on_hub(hub, work)


def test_its_limits_are_obeyed(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """It says how many requests are left, and when there are more."""
    for number in range(8):
        hub.put(f"data/{number}", LARGE)
    hub.allowance = 5

    async def work(store: ObjectStore) -> None:
        for number in range(8):
            assert await store.read_range(str(number), 0, 3) == LARGE[:3]
        assert (hub.resolved.total(), hub.refused) == (8, 0)
        await asyncio.gather(*(store.head(str(number)) for number in range(8)))  # those at once are not all foreseen
        assert hub.resolved.total() == 16

    with caplog.at_level(logging.WARNING):
        on_hub(hub, work, max_retries=0)
    assert "the Hub takes no more requests for files for 1 s" in caplog.text


def test_the_token_is_shown_to_the_hub_alone(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.put("data/x", LARGE)
    on_hub(hub, lambda store: store.read_range("x", 0, 3))
    assert all(headers.get("authorization") == "Bearer hf_test_token" for _, _, headers in hub.asked)
    assert [headers.get("authorization") for _, _, headers in hub.stored.asked] == [None]
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "some/pictures" in said(hub, StoreNotFound)
    (tmp_path / "token").write_text("hf_test_token\n")
    on_hub(hub, lambda store: store.read_range("x", 0, 3))
    assert "set HF_TOKEN" in said(hub, StoreNotFound, anonymous=True)
    monkeypatch.setenv("HF_TOKEN", "two\r\nlines: x")
    assert "HF_TOKEN holds no token" in (message := said(hub, InvalidInput))
    assert "lines" not in message


def test_what_it_refuses_is_said_in_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for status, code, kind, why in (
        (401, "RepoNotFound", StoreNotFound, "there is no dataset some/pictures"),
        (404, "RevisionNotFound", StoreNotFound, "has no revision main"),
        (403, "GatedRepo", StoreDenied, "lets in who has asked"),
        (404, "EntryNotFound", StoreNotFound, "no such object"),
        (403, "", StoreDenied, "does not allow to read it"),
        (503, "", StoreUnavailable, "status 503"),
        (429, "", StoreUnavailable, "status 429"),
        (418, "", InvalidInput, "status 418"),
    ):
        answer = status, {"x-error-code": code}, b""
        monkeypatch.setattr(hub.front, "says", lambda path, headers, answer=answer: answer)
        assert why in said(hub, kind)


def test_it_lists_page_by_page_at_a_revision(hub: Hub) -> None:
    hub.page_files = 3
    for number in range(10):
        hub.put(f"data/{number}", LARGE if number % 2 else b"small")

    async def work(store: ObjectStore) -> None:
        found = [each async for each in store.list()]
        assert [(each.key, each.size_bytes) for each in found] == [(str(n), 2560 if n % 2 else 5) for n in range(10)]
        for each in found:
            assert each.etag == await store.etag(each.key)
        as_ever = hub.front.says
        hub.front.says = lambda path, headers: (200, {"link": '<http://127.0.0.1:1/x>; rel="next"'}, b"[]")
        with pytest.raises(StoreUnavailable, match="names another server"):
            await listed(store)
        for wrong in (b"{}", b"nonsense", b'[{"type": "file"}]', b'[{"type": "file", "path": "x", "size": "y"}]'):
            hub.front.says = lambda path, headers, wrong=wrong: (200, {}, wrong)  # type: ignore[misc]
            with pytest.raises(StoreUnavailable, match="sent no listing"):
                await listed(store)
        hub.front.says = as_ever

    on_hub(hub, work)
    other = open_store("hf://datasets/some/others", StoreSettings.from_environment())
    with pytest.raises(StoreNotFound, match="no dataset some/others"):
        asyncio.run(other.head("x"))


class TestRedirects:
    """A server that pods may ask must not have them ask others."""

    def test_a_web_server_leads_to_itself_only(self, web: WebFiles, hub: Hub) -> None:
        web.put("moved/x", b"0123456789")

        def says(path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes] | None:
            if path.startswith("/a/"):
                return 301, {"location": path.replace("/a/", "/moved/")}, b""
            if path.startswith("/round/"):
                return 302, {"location": path}, b""
            if path.startswith("/away/"):
                return 302, {"location": f"{hub.stored.url}/x"}, b""
            return None

        web.says = says

        async def read(folder: str) -> bytes:
            store = open_store(f"{web.url}/{folder}", StoreSettings.from_environment(max_retries=0))
            try:
                return bytes(await store.read_range("x", 2, 5))
            finally:
                await store.close()

        assert asyncio.run(read("a")) == b"234"
        with pytest.raises(StoreDenied, match="refill follows on the same server only"):
            asyncio.run(read("away"))
        with pytest.raises(StoreDenied):
            asyncio.run(read("round"))
        assert hub.stored.asked == []

    def test_a_server_that_knows_no_ranges_is_named(self, web: WebFiles) -> None:
        web.put("x", LARGE)
        web.knows_ranges = False

        async def work(store: ObjectStore) -> None:
            assert await store.read_range("x", 0, len(LARGE)) == LARGE
            with pytest.raises(InvalidInput, match="it must know ranges"):
                await store.read_range("x", 10, 20)
            web.says = lambda path, headers: (206, {"content-range": "bytes 0-9/10"}, b"0123456789")
            with pytest.raises(StoreUnavailable, match="bytes that were not asked for"):
                await store.read_range("x", 10, 20)
            web.says = lambda path, headers: (200, {"content-encoding": "gzip"}, b"0123456789")
            with pytest.raises(InvalidInput, match="compresses it"):
                await store.read_range("x", 0, 10)
            await store.close()

        asyncio.run(work(open_store(web.url, StoreSettings(max_retries=0))))
