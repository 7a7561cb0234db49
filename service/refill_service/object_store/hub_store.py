"""Datasets on the Hugging Face Hub, whose servers ask to be asked seldom.

The Hub says where a file is: a signed URL of another server, which is kept and read from for as long as it is taken. So
a pod asks the Hub once a file, and again when the URL has expired. Small files that the Hub has itself come with the
first request. Its limits (``RateLimit``) are obeyed: who has no request left waits until there are more.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote
from weakref import WeakValueDictionary

from refill.errors import InvalidInput, RefillError, StoreDenied, StoreNotFound, StoreUnavailable
from refill_service.object_store.base import ListedVersion
from refill_service.object_store.http_store import HttpStore
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings
from refill_service.object_store.store_url import StoreUrl
from refill_service.object_store.web_client import WebAnswer, joined, origin_of, seconds_to_wait

log = logging.getLogger(__name__)

_HUB = "https://huggingface.co"
_HUB_AT_ONCE = 8
_MOST_PLACES = 32_768
"""Signed URLs that are kept, of about 1 KB each."""
_EXPIRED = (400, 401, 403, 404, 410)
"""What servers say to a signed URL that is no longer one."""
_REDIRECTS = (301, 302, 303, 307, 308)
_PAGE_BYTES = 16 << 20
_MOST_WAIT_SECONDS = 600.0
_TOKEN = re.compile(r"[A-Za-z0-9_.-]{8,512}")
_LEFT = re.compile(r";\s*r=([0-9]{1,18})")
_RESET = re.compile(r";\s*t=([0-9]{1,18})")
_NEXT = re.compile(r'<([^>]+)>\s*;\s*rel="next"')


class HubStore(HttpStore):
    """Keys are paths in the dataset, below a folder of it."""

    def __init__(self, named: StoreUrl, settings: StoreSettings, *, counters: StoreCounters | None = None) -> None:
        super().__init__(named, settings, counters=counters, server=settings.hub_endpoint_url or _HUB)
        owner, name = named.segments[1:3]
        name, _, revision = name.partition("@")
        self._dataset = f"{owner}/{name}"
        self._revision = revision or "main"  # as a URL has it
        self._folder = named.segments[3:]
        self._anonymous = settings.anonymous
        self._hub_headers: dict[str, str] | None = None
        self._hub_slots = asyncio.Semaphore(min(_HUB_AT_ONCE, settings.max_connections))
        self._resolves, self._calls = _HubPace("files"), _HubPace("listings")
        self._places: OrderedDict[str, WebAnswer] = OrderedDict()
        """By key: what the Hub said last: a redirect to a signed URL, or that it has the file itself."""
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def _read_start(self, key: str, most_bytes: int) -> tuple[memoryview, int]:
        # Who opens a dataset wants what its revision is now.
        self._places.pop(key, None)
        return await super()._read_start(key, most_bytes)

    async def _ask(
        self,
        key: str,
        headers: dict[str, str],
        most_bytes: int,
        *,
        method: str = "GET",
        etag: str | None = None,
        once: bool = False,
    ) -> WebAnswer:
        if method == "HEAD":
            return await self._said_by_hub(key, {}, 0, method)
        place = self._places.get(key)
        if place is not None and etag not in (None, place.version):
            del self._places[key]  # the revision may be another commit now
        expired_before = False
        while True:
            asked = None
            # A second request does not wait for a first one that hangs.
            async with nullcontext() if once else self._asking.setdefault(key, asyncio.Lock()):
                place = self._places.get(key)
                if place is None:
                    place = asked = await self._said_by_hub(key, headers, most_bytes, method, once=once)
            if place.status not in _REDIRECTS and asked is None:
                place = await self._said_by_hub(key, headers, most_bytes, method, once=once)
            if place.status not in _REDIRECTS:
                return place
            self.check_same(key, etag, place.version)
            async with self._slots:
                answer = await self._client.ask(
                    self.url_of(key), place.headers["location"], headers, most_bytes, once=once
                )
            if answer.status not in _EXPIRED:
                break
            if self._places.get(key) is place:
                del self._places[key]
            if expired_before:
                return answer
            expired_before = True
        # What it is the Hub says, and not the server that keeps it.
        return replace(answer, headers=dict(answer.headers) | {"etag": place.headers.get("etag", "")})

    async def _said_by_hub(
        self, key: str, headers: dict[str, str], most_bytes: int, method: str, *, once: bool = False
    ) -> WebAnswer:
        """The bytes, or the size where it is a HEAD, or a redirect to them. What it was is kept."""
        path = "/".join(quote(part, safe="") for part in (*self._folder, *key.split("/")))
        url = f"{self._server}/datasets/{self._dataset}/resolve/{self._revision}/{path}"
        answer = await self._asked_hub(url, key, headers, most_bytes, method, self._resolves, once=once)
        found = dict(answer.headers)
        if etag := found.get("x-linked-etag") or found.get("etag"):
            found["etag"] = etag.removeprefix("W/")
        if answer.status not in _REDIRECTS:
            if answer.status in (200, 206) and method == "GET":
                self._keep(key, replace(answer, headers=found, data=memoryview(b"")))
            return replace(answer, headers=found)
        found["location"] = joined(url, found.get("location", ""))
        if self._https_only and not found["location"].startswith("https://"):
            raise StoreDenied(f"{self.url_of(key)}: {self._server} names a server without TLS", key=key)
        answer = replace(answer, headers=found)
        if method == "HEAD":
            size = found.get("x-linked-size", "")
            return replace(answer, status=200, headers=found | {"content-length": size})
        self._keep(key, answer)
        return answer

    def _keep(self, key: str, answer: WebAnswer) -> None:
        self._places[key] = answer
        if len(self._places) > _MOST_PLACES:
            self._places.popitem(last=False)

    async def _asked_hub(
        self,
        url: str,
        key: str,
        headers: dict[str, str],
        most_bytes: int,
        method: str,
        pace: _HubPace,
        *,
        once: bool = False,
    ) -> WebAnswer:
        if self._hub_headers is None:
            token = None if self._anonymous else await asyncio.to_thread(_token)
            self._hub_headers = {} if token is None else {"authorization": f"Bearer {token}"}
        async with self._hub_slots:
            return await self._client.ask(
                self.url_of(key), url, headers | self._hub_headers, most_bytes, method=method, pace=pace, once=once
            )

    async def _list(self, prefix: str) -> AsyncIterator[ListedVersion]:
        folder = (*self._folder, *prefix.split("/")[:-1])
        path = "/".join(quote(part, safe="") for part in folder)
        url: str | None = f"{self._server}/api/datasets/{self._dataset}/tree/{self._revision}/{path}?recursive=true"
        found: list[ListedVersion] = []
        above = len("".join(f"{part}/" for part in self._folder))
        while url is not None:
            answer = await self._asked_hub(url, prefix, {}, _PAGE_BYTES, "GET", self._calls)
            if answer.headers.get("x-error-code") == "EntryNotFound":
                break
            self._check(prefix, answer)
            found += [each for each in self._listed(answer, above) if each.key.startswith(prefix)]
            more = _NEXT.search(answer.headers.get("link", ""))
            url = joined(url, more[1]) if more else None
            if url is not None and origin_of(url) != origin_of(self._server):
                raise StoreUnavailable(f"{self.url}: {self._server} names another server for the rest of its listing")
        for each in sorted(found, key=lambda each: each.key.encode()):
            yield each

    def _listed(self, answer: WebAnswer, above: int) -> list[ListedVersion]:
        try:
            return listed(bytes(answer.data), above)
        except ValueError as error:
            raise StoreUnavailable(f"{self.url}: {self._server} sent no listing of files") from error

    def _refusal(self, key: str, answer: WebAnswer) -> RefillError:
        code = answer.headers.get("x-error-code", "")
        if code == "RepoNotFound":
            return StoreNotFound(
                f"{self.url}: there is no dataset {self._dataset} at {self._server}, or it is a private one:"
                " set HF_TOKEN"
            )
        if code == "RevisionNotFound":
            return StoreNotFound(f"{self.url}: {self._dataset} has no revision {self._revision}")
        if code == "GatedRepo":
            return StoreDenied(
                f"{self.url}: the owner of {self._dataset} lets in who has asked: do so at {self._server}, and"
                " set HF_TOKEN"
            )
        return super()._refusal(key, answer)


def listed(data: bytes, above: int) -> list[ListedVersion]:
    """The files that an answer lists. Raises ValueError for one that lists none.

    :param above: so many letters of each path name the folder.
    """
    try:
        entries = json.loads(data)
        if not isinstance(entries, list):
            raise ValueError("no list")
        found = [
            ListedVersion(str(each["path"])[above:], int(each["size"]), f'"{(each.get("lfs") or each)["oid"]}"')
            for each in entries
            if each["type"] == "file"
        ]
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError("no listing") from error
    if any(each.size_bytes < 0 for each in found):
        raise ValueError("a size below 0")
    return found


class _HubPace:
    """Keeps to the Hub's limits: its answers say how many requests of a kind are left, and when there are more.

    :param kind: of requests, for the log.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._until = 0.0

    async def ready(self) -> None:
        await asyncio.sleep(max(0.0, self._until - time.monotonic()))

    def heard(self, answer: WebAnswer) -> bool:
        limit = answer.headers.get("ratelimit", "")
        left, reset = _LEFT.search(limit), _RESET.search(limit)
        refused = answer.status == 429
        if refused or (left is not None and int(left[1]) == 0):
            seconds = min(_MOST_WAIT_SECONDS, float(reset[1]) if reset else seconds_to_wait(answer))
            if seconds > 0:
                self._until = time.monotonic() + seconds
                log.warning("the Hub takes no more requests for %s for %.0f s", self._kind, seconds)
                return refused
        return False


def _token() -> str | None:
    """As huggingface_hub finds it. Raises :class:`InvalidInput` for what is none, without showing it."""
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token:
        home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
        try:
            token = Path(os.environ.get("HF_TOKEN_PATH") or Path(home, "token")).read_text().strip()
        except (OSError, ValueError):
            return None
    if token and not _TOKEN.fullmatch(token):
        raise InvalidInput("HF_TOKEN holds no token of the Hub: one has only letters, digits, '_', '.' and '-'")
    return token or None
