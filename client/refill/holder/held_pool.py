"""How do many requests to one pod share a few connections? Each has one for itself until its answer has been passed on.

Requests take connections in the order in which they came. Where they wait for that, since those before them wait for
the store, there are more connections for a while. Requests of different jobs, or with different tokens, share none.
"""

from __future__ import annotations

import logging
import select
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from refill.errors import PodUnreachable, RefillError
from refill.holder.held_request import Asker, AskerGone, HeldRequest, PoolKey
from refill.pods.credentials import Credentials
from refill.pods.holder_door import ALIVE_LANE, DATA_LANE, QUICK_LANE
from refill.pods.pod_failures import no_sign_of_life, unreachable
from refill.pods.pod_link import PodLink

log = logging.getLogger(__name__)

_KEPT = {DATA_LANE: 4, QUICK_LANE: 1, ALIVE_LANE: 1}
_MOST = {DATA_LANE: 16, QUICK_LANE: 2, ALIVE_LANE: 1}
MOST_CONNECTIONS = sum(_MOST.values())
"""To one pod, for one job."""
_WAITS_SECONDS = 0.05
"""After so long a wait for a connection there is one more."""
_UNUSED_SECONDS = 10.0
_SILENT_SECONDS = 2.0
"""A pod of which nothing was heard for so long, while it is asked, gives no sign of life."""
_PIECE_BYTES = 256 << 10
_LOOK_SECONDS = 1.0
_HEAD_ENDS = b"\r\n\r\n"
_MOST_HEAD_BYTES = 256 << 10
_MOST_ALIVE_BYTES = 64 << 10


class HeardPods:
    """When this process has heard of each pod last, over any connection."""

    def __init__(self) -> None:
        self._at: dict[tuple[str, str | None], float] = {}

    def heard(self, key: PoolKey) -> None:
        self._at[key.pod, key.ca_file] = time.monotonic()

    def is_silent(self, key: PoolKey, since: float, seconds: float = _SILENT_SECONDS) -> bool:
        """Whether nothing was heard for so long."""
        return time.monotonic() > max(since, self._at.get((key.pod, key.ca_file), 0.0)) + seconds


class HeldPool:
    """Keeps the connections to one pod, and gives each request its turn on one of them.

    :param begin: has a function called by another thread.
    :param done: called when a request is answered, with whether its asker may ask again.
    """

    def __init__(
        self,
        key: PoolKey,
        heard: HeardPods,
        begin: Callable[[Callable[[], None]], Any],
        done: Callable[[Asker, bool], None],
    ) -> None:
        self._key = key
        self._heard = heard
        self._begin, self._done = begin, done
        self._changing = threading.Lock()
        self._waiting: deque[HeldRequest] = deque()
        self._num_busy = 0
        self._idle: list[tuple[PodLink, float]] = []
        """With when each was used last; that one at the end."""
        self._size = _KEPT[key.lane]
        self._is_closed = False
        self._credentials = Credentials(ca_file=key.ca_file)

    def put(self, request: HeldRequest) -> None:
        with self._changing:
            self._waiting.append(request)
        self._go_on()

    def look(self, now: float) -> None:
        """Called several times a second: there are more connections where requests wait, and fewer after a while."""
        with self._changing:
            if self._waiting and now > self._waiting[0].came_at + _WAITS_SECONDS:
                self._size = min(self._size + 1, _MOST[self._key.lane])
            unused = []
            while len(self._idle) + self._num_busy > _KEPT[self._key.lane] and self._idle:
                if now < self._idle[0][1] + _UNUSED_SECONDS:
                    break
                unused.append(self._idle.pop(0)[0])
            if not self._waiting and len(self._idle) + self._num_busy <= _KEPT[self._key.lane]:
                self._size = _KEPT[self._key.lane]
        for link in unused:
            link.close()
        self._go_on()

    def close(self) -> None:
        """Nobody asks any more. What is under way ends by itself."""
        with self._changing:
            self._is_closed = True
            unused, self._idle = self._idle, []
        for link, _ in unused:
            link.close()

    def _go_on(self) -> None:
        with self._changing:
            if not self._waiting or self._num_busy >= self._size:
                return
            self._num_busy += 1
        self._begin(self._serve)

    def _serve(self) -> None:
        """One request after another, as long as any wait."""
        while True:
            with self._changing:
                if not self._waiting or self._num_busy > self._size:
                    self._num_busy -= 1
                    return
                request = self._waiting.popleft()
            self._answer(request)

    def _answer(self, request: HeldRequest) -> None:
        may_ask_again = True
        try:
            self._pass_on(request)
        except AskerGone:
            may_ask_again = False
        except RefillError as error:
            may_ask_again = self._said(request, error)
        except Exception:  # of one request: the others go on
            log.exception("a request to %s is broken off", self._key.pod)
            may_ask_again = False
        self._done(request.asker, may_ask_again)

    def _pass_on(self, request: HeldRequest) -> None:
        """Raises :class:`AskerGone`, or :class:`RefillError` to say what is wrong with the pod."""
        request.begins()
        link = self._kept_link()
        if not request.asker.is_there():
            if link is not None:
                self._keep(link)
            raise AskerGone
        head = None
        if link is not None:
            try:
                head = self._asked(link, request)
            except (ConnectionError, ssl.SSLEOFError):
                pass  # the pod had closed a connection that was not in use
            except OSError as error:
                raise unreachable(self._key.pod, error) from error
        if link is None or head is None:
            link, head = self._asked_anew(request)
        try:
            self._pass_answer(link, head, request)
        except OSError as error:
            link.close()
            raise AskerGone from error  # it hears of it by its own connection, which is closed
        except BaseException:
            link.close()
            raise
        self._keep(link)

    def _asked_anew(self, request: HeldRequest) -> tuple[PodLink, bytes]:
        link = PodLink(self._key.pod, self._credentials, request.connect_seconds)
        link.timeout = max(0.001, request.ends_at - time.monotonic())
        began = time.monotonic()

        def still_connects() -> None:
            if not request.asker.is_there():
                raise AskerGone
            seconds = request.silent_seconds
            if seconds is not None and self._heard.is_silent(self._key, began, seconds):
                raise no_sign_of_life(self._key.pod)

        try:
            link.connect(still_connects)
            link.sock.setblocking(False)
            request.begins()
            return link, self._asked(link, request)
        except OSError as error:
            link.close()
            raise unreachable(self._key.pod, error) from error
        except BaseException:
            link.close()
            raise

    def _asked(self, link: PodLink, request: HeldRequest) -> bytes:
        """Sends a request, and waits for its answer's head, which is returned with what has come of the body. Raises
        OSError."""
        try:
            link.sends(len(request.content))
            _send(link, request.content, request.ends_at)
            received = bytearray()
            piece = memoryview(bytearray(16 << 10))
            while _HEAD_ENDS not in received:
                count = self._read(link, piece, request)
                if not count:
                    raise ConnectionResetError("Remote end closed connection without response")
                received += piece[:count]
                if len(received) > _MOST_HEAD_BYTES:
                    raise PodUnreachable(f"{self._key.pod} answers with a head that is too long", url=self._key.pod)
        except BaseException:
            link.close()
            raise
        link.has_answered()
        return bytes(received)

    def _pass_answer(self, link: PodLink, received: bytes, request: HeldRequest) -> None:
        head, _, begun = received.partition(_HEAD_ENDS)
        left = _body_bytes(head, self._key.pod) - len(begun)
        if self._key.lane == ALIVE_LANE:
            self._answer_all(received + self._rest(link, left, request), request)
        else:
            request.asker.gets(received)
            piece = memoryview(bytearray(min(_PIECE_BYTES, max(left, 1))))
            while left > 0:
                count = self._read(link, piece[: min(left, len(piece))], request)
                if not count:
                    raise ConnectionResetError("its answer is broken off")
                request.asker.gets(piece[:count])
                left -= count
        if b"\r\nconnection: close" in head.lower():
            link.close()

    def _rest(self, link: PodLink, left: int, request: HeldRequest) -> bytes:
        if left > _MOST_ALIVE_BYTES:
            raise PodUnreachable(f"{self._key.pod} gives a sign of life that is too long", url=self._key.pod)
        found = bytearray()
        piece = memoryview(bytearray(max(left, 1)))
        while len(found) < left:
            count = self._read(link, piece[: left - len(found)], request)
            if not count:
                raise unreachable(self._key.pod, ConnectionResetError("it broke off a sign of life"))
            found += piece[:count]
        return bytes(found)

    def _answer_all(self, answer: bytes, request: HeldRequest) -> None:
        """One sign of life is one for all who wait for it."""
        for other in self._others_who_wait():
            try:
                other.asker.gets(answer)
            except AskerGone:
                self._done(other.asker, False)
            else:
                self._done(other.asker, True)
        request.asker.gets(answer)

    def _others_who_wait(self) -> list[HeldRequest]:
        with self._changing:
            others = list(self._waiting)
            self._waiting.clear()
        return others

    def _read(self, link: PodLink, into: memoryview, request: HeldRequest) -> int:
        """What has come by now, at least a byte; 0: the pod has closed. Raises TimeoutError and :class:`AskerGone`."""
        filled = 0
        while True:
            try:
                while filled < len(into):
                    count = link.sock.recv_into(into[filled:])
                    if not count:
                        return filled
                    filled += count
                    self._heard.heard(self._key)
                return filled
            except (BlockingIOError, ssl.SSLWantReadError):
                if filled:
                    return filled
            except ssl.SSLEOFError:
                return filled
            self._await(link, request)

    def _await(self, link: PodLink, request: HeldRequest) -> None:
        watched = select.poll()
        watched.register(link.sock, select.POLLIN)
        watched.register(request.asker.sock, select.POLLIN)
        number = link.sock.fileno()
        while True:
            left = request.ends_at - time.monotonic()
            if left <= 0:
                raise TimeoutError
            found = [which for which, _ in watched.poll(1000 * min(left, _LOOK_SECONDS))]
            if number in found:
                request.ends_at = max(request.ends_at, time.monotonic() + _LOOK_SECONDS)  # it is silent no longer
                return
            if found:
                raise AskerGone

    def _said(self, request: HeldRequest, error: RefillError) -> bool:
        """Whether its asker has heard it, and may ask again. Who waits for the same sign of life hears it, too: else
        each would wait for a try of its own, one after another."""
        is_late = error.details.get("silent") or error.details.get("handshake")
        is_alive = is_late and self._key.lane == ALIVE_LANE and not self._heard.is_silent(self._key, 0.0)
        for other in self._others_who_wait() if self._key.lane == ALIVE_LANE else []:
            self._done(other.asker, _has_heard(other, None if is_alive else error))
        return _has_heard(request, None if is_alive else error)

    def _kept_link(self) -> PodLink | None:
        while True:
            with self._changing:
                if not self._idle:
                    return None
                link = self._idle.pop()[0]
            if _is_quiet(link):
                return link
            link.close()

    def _keep(self, link: PodLink) -> None:
        with self._changing:
            if link.sock is not None and not self._is_closed:
                self._idle.append((link, time.monotonic()))
                return
        link.close()


def _has_heard(request: HeldRequest, error: RefillError | None) -> bool:
    try:
        request.is_said(error)
    except AskerGone:
        return False
    return True


def _send(link: PodLink, content: bytes, ends: float) -> None:
    link.sock.settimeout(max(0.001, ends - time.monotonic()))
    try:
        link.sock.sendall(content)
    finally:
        link.sock.setblocking(False)


def _is_quiet(link: PodLink) -> bool:
    """Whether the pod has not closed it."""
    watched = select.poll()
    watched.register(link.sock, select.POLLIN)
    return not watched.poll(0)


def _body_bytes(head: bytes, pod: str) -> int:
    for line in head.lower().split(b"\r\n")[1:]:
        if line.startswith(b"content-length:") and line[15:].strip().isdigit():
            return int(line[15:])
    if head.split(b" ", 2)[1:2] in ([b"204"], [b"304"]):
        return 0
    raise PodUnreachable(f"{pod} does not say how long its answer is", url=pod)
