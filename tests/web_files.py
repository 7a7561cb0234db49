"""A web server of our own, in this process, and a Hub: it speaks resolve, redirects to signed URLs, and ranges."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

Said = tuple[int, dict[str, str], bytes]
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class WebFiles:
    """Files by path, served with ranges and ETags as web servers do. What it is to do otherwise is set on it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        """By path, decoded, without the first slash."""
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        """Method, path as it came, headers by names in small letters."""
        self.has_etags = True
        self.has_times = True
        self.knows_ranges = True
        self.knows_if_match = True
        self.fail_first = 0
        self.cut_first = 0
        self.stalls = False
        self.says: Callable[[str, dict[str, str]], Said | None] = lambda path, headers: None
        """What is answered in place of the file at a path, as it came; None: the file."""
        self._written: dict[str, int] = {}
        self._lock = threading.Lock()
        self.goes_on = threading.Event()
        files = self

        class Handler(_Handler):
            of = files

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def put(self, path: str, data: bytes) -> None:
        with self._lock:
            self.files[path] = data
            self._written[path] = self._written.get(path, 0) + 1

    def remove(self, path: str) -> None:
        self.files.pop(path, None)

    def etag(self, path: str) -> str:
        return f'"{hashlib.sha256(self.files[path]).hexdigest()[:32]}"'

    def modified(self, path: str) -> str:
        """Another second with each write."""
        return f"Wed, 21 Oct 2015 07:28:{self._written[path]:02} GMT"

    def requests(self, method: str = "GET") -> Counter[str]:
        return Counter(unquote(path.partition("?")[0]).lstrip("/") for each, path, _ in self.asked if each == method)

    def take(self, name: str) -> bool:
        """Whether a count is not used up; uses one of it."""
        with self._lock:
            left = getattr(self, name)
            setattr(self, name, max(0, left - 1))
            return bool(left > 0)

    def close(self) -> None:
        self.goes_on.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    of: WebFiles
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        of, path = self.of, unquote(urlsplit(self.path).path).lstrip("/")
        asked = {name.lower(): value for name, value in self.headers.items()}
        of.asked.append((self.command, self.path, asked))
        if of.stalls:
            of.goes_on.wait(30)
        if of.take("fail_first"):
            return self.answer(503, {})
        if (said := of.says(self.path, asked)) is not None:
            return self.answer(*said)
        if path not in of.files:
            return self.answer(404, {})
        data, headers = of.files[path], dict[str, str]()
        if of.has_etags:
            headers["etag"] = of.etag(path)
        if of.has_times:
            headers["last-modified"] = of.modified(path)
        if of.knows_if_match and self.headers.get("if-match", of.etag(path)) != of.etag(path):
            return self.answer(412, headers)
        found = _RANGE.fullmatch(self.headers.get("range", ""))
        if found is None or not of.knows_ranges:
            return self.answer(200, headers, data)
        start, end = int(found[1]), min(int(found[2]) + 1, len(data))
        if start >= len(data):
            return self.answer(416, headers | {"content-range": f"bytes */{len(data)}"})
        return self.answer(206, headers | {"content-range": f"bytes {start}-{end - 1}/{len(data)}"}, data[start:end])

    do_HEAD = do_GET  # noqa: N815

    def answer(self, status: int, headers: dict[str, str], data: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if len(data) > 1 and self.of.take("cut_first"):
            data, self.close_connection = data[: len(data) // 2], True
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class Hub:
    """One dataset of a Hub. Files of 100 bytes or less are its own, as those of git are; others lie on a server of
    another name, ``stored``, to which it signs URLs. Keys are paths in the dataset at its one revision."""

    def __init__(self, dataset: str = "some/pictures", token: str | None = None) -> None:
        self.dataset = dataset
        self.stored, self.front = WebFiles(), WebFiles()
        self.files: dict[str, bytes] = {}
        self.token = token
        self.large_bytes = 100
        self.allowance: int | None = None
        """Requests that it takes in a window of a second, as it says in RateLimit; None: it counts none."""
        self.refused = 0
        self.page_files = 1000
        self.resolved: Counter[str] = Counter()
        """Requests for files that came to the Hub itself."""
        self._used, self._window_ends = 0, 0.0
        self._signed = 0
        self.front.says = self._answered
        self.stored.says = self._checked
        self.stored.has_etags = False

    @property
    def url(self) -> str:
        return self.front.url

    @property
    def asked(self) -> list[tuple[str, str, dict[str, str]]]:
        return self.front.asked

    def put(self, path: str, data: bytes) -> None:
        self.files[path] = data
        self.front.put(self._own(path), data)
        self.stored.put(self._hash(data), data)

    def remove(self, path: str) -> None:
        self.files.pop(path, None)
        self.front.remove(self._own(path))

    def expire(self) -> None:
        """No URL that was signed so far is taken any more."""
        self._signed += 1

    def close(self) -> None:
        self.front.close()
        self.stored.close()

    def _own(self, path: str) -> str:
        return f"datasets/{self.dataset}/resolve/main/{path}"

    def _hash(self, data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    def _answered(self, path: str, headers: dict[str, str]) -> Said | None:
        if self.token is not None and headers.get("authorization") != f"Bearer {self.token}":
            return 401, {"x-error-code": "RepoNotFound"}, b""
        parts = urlsplit(path)
        plain = unquote(parts.path).lstrip("/")
        limits, is_refused = self._limits("resolvers" if "/resolve/" in plain else "api")
        if is_refused:
            self.refused += 1
            return 429, limits, b""
        tree = f"api/datasets/{self.dataset}/tree/main/"
        if plain.startswith(tree):
            return self._listing(plain.removeprefix(tree), parts.query, parts.path, limits)
        key = plain.removeprefix(self._own(""))
        if key == plain:
            return 404, limits | {"x-error-code": "RepoNotFound"}, b""
        self.resolved[key] += 1
        data = self.files.get(key)
        if data is None:
            return 404, limits | {"x-error-code": "EntryNotFound"}, b""
        if len(data) <= self.large_bytes:
            return None
        name = self._hash(data)
        target = f"{self.stored.url}/{name}?Signature={self._signed}&Key-Pair-Id=x%2Fy"
        found = {"location": target, "x-linked-etag": f'"{name}"', "x-linked-size": str(len(data)), "etag": '"other"'}
        return 302, limits | found, b""

    def _limits(self, kind: str) -> tuple[dict[str, str], bool]:
        if self.allowance is None:
            return {}, False
        if time.monotonic() >= self._window_ends:
            self._used, self._window_ends = 0, time.monotonic() + 1
        self._used += 1
        left = self.allowance - self._used
        return {"ratelimit": f'"{kind}";r={max(0, left)};t=1'}, left < 0

    def _listing(self, folder: str, query: str, path: str, limits: dict[str, str]) -> Said:
        below = sorted(key for key in self.files if key.startswith(f"{folder}/" if folder else ""))
        if not below:
            return 404, limits | {"x-error-code": "EntryNotFound"}, b""
        first = int(parse_qs(query).get("cursor", ["0"])[0])
        page = below[first : first + self.page_files]
        entries: list[dict[str, object]] = [{"type": "directory", "path": "folder", "oid": "x", "size": 0}]
        for key in page:
            data = self.files[key]
            entry: dict[str, object] = {"type": "file", "path": key, "size": len(data), "oid": "of git"}
            if len(data) > self.large_bytes:
                entry["lfs"] = {"oid": self._hash(data), "size": len(data)}
            else:
                entry["oid"] = self.front.etag(self._own(key)).strip('"')
            entries.append(entry)
        if first + len(page) < len(below):
            more = f"{self.url}{path}?recursive=true&cursor={first + len(page)}"
            limits = limits | {"link": f'<{more}>; rel="next"'}
        return 200, limits, json.dumps(entries).encode()

    def _checked(self, path: str, headers: dict[str, str]) -> Said | None:
        signed = parse_qs(urlsplit(path).query).get("Signature", [""])
        return None if signed == [str(self._signed)] and "authorization" not in headers else (403, {}, b"")
