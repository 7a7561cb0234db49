"""How is a connection to one pod opened, and when is it known to be gone?

A pod is named by a URL, ``http://refill:8000``, or on its own machine by its Unix socket, ``unix:/run/refill.sock``.
The name is resolved anew for each connection: a pod that was replaced has its name and another address. All addresses
are tried, each a moment after the one before, and the first that answers is taken.

A network that drops packets says nothing of a pod that has gone. So connecting has a short limit of its own, and the
kernel asks the pod's machine now and then, while an answer is waited for, whether it is still there. A pod that is busy
or paused is: its kernel answers.
"""

from __future__ import annotations

import errno
import http.client
import io
import os
import re
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from refill.errors import InvalidInput
from refill.pods.credentials import Credentials
from refill.pods.name_lookup import addresses_of
from refill.pods.pod_answer import HEAD_BYTES, LEAST_BYTES_PER_SECOND, PlainAnswer, read_head
from refill.pods.tls_sessions import Handshake

UNIX = "unix:"
GONE_SECONDS = 5
"""A pod whose machine has confirmed nothing for so long is gone, or the network is."""
PROBE_AFTER_SECONDS = 2
_NEXT_ADDRESS_SECONDS = 0.25
"""As in RFC 8305 (Happy Eyeballs)."""
_LONGEST_UNIX_PATH_BYTES = 100
"""Linux takes 107, of which ``.memory`` needs 7."""
_LONGEST_HANDSHAKE_SECONDS = 60.0
_SMALL_BODY_BYTES = 64 << 10
"""Finds room at the pod's machine, even if the pod itself does not read."""
_NOT_OF_PATHS, _NOT_OF_HEADERS = re.compile("[\x00-\x20\x7f]"), re.compile("[\r\n\x00]")


class HandshakeBroken(OSError):
    """A pod's machine has taken the connection, and the pod did not come to an end with TLS. It may have very many
    handshakes to do, and that is no sign that it is gone."""


class PodLink(http.client.HTTPConnection):
    """HTTP/1.1 to one pod. Connects with the first request, and anew after ``close``.

    :param url: as :func:`checked_url` has it.
    :param connect_timeout_seconds: for its name, and once more for its machine. TLS, which takes the pod itself, has
        the request's time: after a restart a pod may have many handshakes to do, and would do them in vain.

    Raises :class:`HandshakeBroken` where TLS begins and does not end.
    """

    sock: Any
    is_held = False
    """Whether another process passes requests on."""

    def __init__(self, url: str, credentials: Credentials, connect_timeout_seconds: float) -> None:
        self._unix_path = url.removeprefix(UNIX) if url.startswith(UNIX) else None
        parts = urlsplit(url)
        self._credentials = credentials
        self.shown: dict[str, str] = {}
        """Headers of the request that was sent last."""
        self._is_tls = parts.scheme == "https"
        self._connect_timeout_seconds = connect_timeout_seconds
        if self._is_tls:
            self.default_port = http.client.HTTPS_PORT
        self._handshake: Handshake | None = None
        self._coming: PlainAnswer | _ComingAnswer | None = None
        self._begun = b""
        """Of an answer, what has been read."""
        self._sock_seconds: float | None = None
        self._gone_seconds: int | None = None
        """As the connection has them; None: that is not known."""
        super().__init__("pod" if self._unix_path else parts.hostname or "", None if self._unix_path else parts.port)

    def connect(self, still_connects: Callable[[], None] | None = None) -> None:
        """:param still_connects: as that of :meth:`send_request`."""
        if self._unix_path is not None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(self._unix_path)
            return
        self.sock = _first_that_answers(self.host, self.port, self._connect_timeout_seconds)
        self.sock.settimeout(self.timeout)
        for name, value in (("TCP_NODELAY", 1), *_WATCHED):
            _set(self.sock, name, value)
        if self._is_tls:
            self._shake_hands(still_connects or _says_nothing)

    def _shake_hands(self, still_connects: Callable[[], None]) -> None:
        try:
            # Certificates are read for TLS only: that takes as long as a round trip to a store.
            self._handshake = Handshake(self._credentials.ssl_context(), self.host, self.port)
            self.sock = self._handshake.begin(self.sock)
            self._handshake.finish(self.sock, self.timeout or _LONGEST_HANDSHAKE_SECONDS, still_connects)
            self.sock.settimeout(self.timeout)
        except (TimeoutError, ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            self.close()
            raise HandshakeBroken(f"it did not come to an end with TLS: {error or type(error).__name__}") from error
        except BaseException:
            self.close()
            raise

    @property
    def was_resumed(self) -> bool:
        """Whether the pod went on with the TLS session of an earlier connection."""
        return self._handshake is not None and bool(self.sock.session_reused)

    def has_answered(self) -> None:
        """Fact: the head of an answer has come."""
        if self._handshake is not None:
            self._handshake.keep(self.sock)

    def send_request(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        seconds: float,
        still_connects: Callable[[], None] | None = None,
    ) -> None:
        """
        :param seconds: that the pod may be silent for.
        :param still_connects: called now and then while TLS is begun; whatever it raises ends that.
        """
        self.timeout = seconds
        if self.sock is None:
            self.connect(still_connects)  # and not kept: who calls it back keeps this link
        if seconds != self._sock_seconds:
            self.sock.settimeout(seconds)
            self._sock_seconds = seconds
        if self._unix_path is None and not self.is_held:
            self.sends(len(body))
        head = self._request_head(method, path, len(body), headers)
        if len(body) <= _SMALL_BODY_BYTES:
            # Together with its head, which comes first: else a pod would read a request twice.
            self.sock.sendall(head + body)
        else:
            self.sock.sendall(head)
            self.sock.sendall(body)

    def _request_head(self, method: str, path: str, num_bytes: int, headers: dict[str, str]) -> bytes:
        if _NOT_OF_PATHS.search(path):
            raise http.client.InvalidURL(f"a path can't have control characters or blanks: {path!r}")
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host_header}", "Accept-Encoding: identity"]
        if num_bytes or method != "GET":
            lines.append(f"Content-Length: {num_bytes}")
        for name, value in headers.items():
            if _NOT_OF_HEADERS.search(value):
                raise ValueError(f"header {name} has a value that ends its line")
            lines.append(f"{name}: {value}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    @cached_property
    def _host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host.encode("idna").decode()
        return host if self.port == self.default_port else f"{host}:{self.port}"

    def close(self) -> None:
        self._sock_seconds = self._gone_seconds = None
        super().close()

    def sends(self, num_bytes: int) -> None:
        """Fact: a pod that reads a large body slowly keeps what is sent waiting, and is not gone for that."""
        seconds = GONE_SECONDS if num_bytes <= _SMALL_BODY_BYTES else 0
        if seconds != self._gone_seconds:
            _set(self.sock, "TCP_USER_TIMEOUT", 1000 * seconds)
            self._gone_seconds = seconds

    def getresponse(self) -> Any:
        """The answer, whose head is waited for: a :class:`PlainAnswer`, or of :mod:`http.client`, with what both
        have."""
        if not self.is_held:
            seconds = self.timeout or 0
            self._begun = read_head(self.sock, time.monotonic() + seconds)
            if (found := PlainAnswer.of(self.sock, self._begun, seconds, self.close)) is not None:
                self._coming = found
                return found
        response = self.response_class(self.sock)
        response.begin()
        if response.will_close:
            self.close()  # the answer has a file of its own, as long as it is read
        return response

    def response_class(  # type: ignore[override]  # http.client calls it, and takes what it returns
        self, sock: socket.socket, *rest: Any, **more: Any
    ) -> http.client.HTTPResponse:
        awaits = self.awaits_more if self.is_held else None
        self._coming = _ComingAnswer(sock, self.timeout or 0, awaits, self._begun)
        return _Answer(self._coming, *rest, **more)  # type: ignore[arg-type]

    def awaits_more(self, ends: float) -> None:
        """Returns when more of an answer has come; raises OSError when nobody will send it, or not by then."""

    def takes(self, more_bytes: int) -> None:
        """Fact: the answer whose head has come may have so long a body."""
        if self._coming is not None:
            self._coming.may_have(more_bytes)

    def goes_on(self) -> None:
        """Fact: nobody wanted to read the answer whose head has come, until now."""
        if self._coming is not None:
            self._coming.goes_on()


class _Answer(http.client.HTTPResponse):
    def flush(self) -> None:
        """Nothing is written to it. Where it ends as a part of circular garbage, its file may have ended before it, and
        Python from 3.13 on would print a traceback of that."""


class _ComingAnswer(io.RawIOBase):
    """One answer's bytes, in its time and no more than it may have, whatever they are.

    :param seconds: for all of it, with a second more for each ``LEAST_BYTES_PER_SECOND``. It is silent no longer.
    :param awaits: called before each read.
    :param begun: what has been read of it.
    """

    def __init__(
        self, sock: socket.socket, seconds: float, awaits: Callable[[float], None] | None, begun: bytes = b""
    ) -> None:
        self._awaits = awaits
        self._begun = memoryview(begun)
        self._seconds = seconds
        self._bytes: Any = sock.makefile("rb", buffering=0)  # the connection may be closed before it is read
        self._ends = time.monotonic() + seconds
        self._left_bytes = HEAD_BYTES

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def may_have(self, more_bytes: int) -> None:
        self._left_bytes += more_bytes

    def goes_on(self) -> None:
        self._ends = time.monotonic() + self._seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._left_bytes <= 0:
            raise http.client.HTTPException("its answer is longer than what was asked for can be")
        if self._awaits is not None:
            self._awaits(self._ends)
        into = memoryview(buffer)[: self._left_bytes]
        count: int | None
        if self._begun:
            count = min(len(into), len(self._begun))
            into[:count] = self._begun[:count]
            self._begun = self._begun[count:]
        else:
            count = self._bytes.readinto(into)
        self._left_bytes -= count or 0
        self._ends += (count or 0) / LEAST_BYTES_PER_SECOND
        if time.monotonic() > self._ends:
            raise TimeoutError
        return count

    def close(self) -> None:
        self._bytes.close()
        super().close()


_WATCHED = (
    ("SO_KEEPALIVE", 1),
    ("TCP_KEEPIDLE", PROBE_AFTER_SECONDS),
    ("TCP_KEEPINTVL", 1),
    ("TCP_KEEPCNT", GONE_SECONDS - PROBE_AFTER_SECONDS),
    ("TCP_USER_TIMEOUT", 1000 * GONE_SECONDS),
)


def _set(sock: socket.socket, name: str, value: int) -> None:
    """Systems differ in what they have of these."""
    level = socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP
    if (option := getattr(socket, name, None)) is not None:
        with suppress(OSError):
            sock.setsockopt(level, option, value)


def _says_nothing() -> None:
    """To who connects."""


def _first_that_answers(host: str, port: int, seconds: float) -> socket.socket:
    """Raises OSError that names each address that was tried, and what became of it; or the name, if it was not found.

    :param seconds: for the name, and once more for its addresses: with one limit for both, a resolver that leaves but
        little of it would let no pod be reached, however often that is tried.
    """
    to_try = list(addresses_of(host, port, seconds))
    failed: list[str] = []
    under_way: dict[socket.socket, str] = {}
    ends, next_at = time.monotonic() + seconds, 0.0
    with selectors.DefaultSelector() as selector:
        try:
            while to_try or under_way:
                now = time.monotonic()
                if to_try and (now >= next_at or not under_way):
                    next_at = now + _NEXT_ADDRESS_SECONDS
                    family, _, _, _, address = to_try.pop(0)
                    if (begun := _begin(family, address, failed)) is not None:
                        under_way[begun[0]] = begun[1]
                        selector.register(begun[0], selectors.EVENT_WRITE)
                    continue
                if now >= ends:
                    break
                for key, _ in selector.select(min(ends, next_at if to_try else ends) - now):
                    sock: socket.socket = key.fileobj  # type: ignore[assignment]  # registered above
                    selector.unregister(sock)
                    where = under_way.pop(sock)
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if code == 0:
                        return sock
                    failed.append(f"{where}: {os.strerror(code)}")
                    sock.close()
            failed += [f"{where}: timed out after {seconds:g} s" for where in under_way.values()]
            raise OSError(f"can't connect to {', '.join(failed)}")
        finally:
            for sock in under_way:
                sock.close()


def _begin(family: int, address: tuple[Any, ...], failed: list[str]) -> tuple[socket.socket, str] | None:
    """The connection that begins, and where it leads to; None, and a word in ``failed``, when it can't even begin."""
    where = f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:  # no IPv6 here
        failed.append(f"{where}: {error.strerror}")
        return None
    sock.setblocking(False)
    code = sock.connect_ex(address)
    if code in (0, errno.EINPROGRESS):
        return sock, where
    failed.append(f"{where}: {os.strerror(code)}")
    sock.close()
    return None


def checked_url(url: str) -> str:
    """Raises :class:`InvalidInput` for what is not the URL of a service or pod."""
    if not isinstance(url, str):
        raise InvalidInput(f"the URL of a service is text, like http://refill:8000, got {url!r:.100}")
    if url.startswith(UNIX):
        path = url.removeprefix(UNIX)
        if not path.startswith("/") or len(os.fsencode(path)) > _LONGEST_UNIX_PATH_BYTES:
            raise InvalidInput(
                f"{url!r} is not the Unix socket of a pod: write unix: and a path that begins with / and has at most "
                f"{_LONGEST_UNIX_PATH_BYTES} bytes, like unix:/run/refill/refill.sock"
            )
        return url
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        right = parts.scheme in ("http", "https") and parts.hostname and not parts.path.strip("/") and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that is not closed, or a name with an empty part
        right = False
    if not right:
        raise InvalidInput(
            f"{url!r} is not the URL of a service, like http://refill:8000 or unix:/run/refill/refill.sock"
        )
    return url.rstrip("/")
