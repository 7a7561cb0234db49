"""How does one request get to a pod, and its answer back? One try each, in order, over a connection of this thread.

Connections open lazily, in the process that uses them: DataLoader workers are forked or spawned. Pods are asked
directly, by no proxy.
"""

from __future__ import annotations

import http.client
import json
import logging
import select
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import urlencode

from refill.errors import InvalidInput, NotAuthenticated, RefillError, error_from_wire
from refill.pods.answer_checks import decoded, not_of_a_pod
from refill.pods.credentials import Credentials
from refill.pods.holder_door import ALIVE_LANE, DATA_LANE, QUICK_LANE, SAID_HEADER, HolderLink, door
from refill.pods.own_process import PerProcess
from refill.pods.pod_failures import no_sign_of_life, unreachable
from refill.pods.pod_link import UNIX, PodLink
from refill.pods.received_batch import Answer, ComingFrame, Expected, ReceivedBatch, room_for
from refill.protocol.wire_format import encode_together

log = logging.getLogger(__name__)

Found = TypeVar("Found")

_LEAST_LINKS = 4
"""Of a thread: to its home, to the service, and to those that were its home before."""
_BINARY = {"Content-Type": "application/octet-stream"}
_MOST_JSON_BYTES = 64 << 20
"""A dataset's metadata has 4 MiB at most."""
_MOST_ERROR_BYTES = 1 << 20
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.5, 1.0
_ALIVE, _BATCHES = "/healthz", "/v1/batches"
_MOST_BROKEN = 3
"""Connections to the holder that break, one after another, before it is left alone for a while."""


class Wait(NamedTuple):
    """How long an answer may take."""

    seconds: float
    """That the pod may be silent for."""
    still_waits: Callable[[str], None] = lambda pod: None
    """Called after half a second, and then about once a second, while nothing comes."""


class Asked(NamedTuple):
    """A POST that is answered with a frame."""

    pod: str
    path: str
    body: bytes
    expected: Expected


class _Breaks:
    """Connections that broke, one after another, before the head of one answer came."""

    def __init__(self) -> None:
        self._num_held = 0

    def says_nothing(self, link: PodLink, was_idle: bool, error: BaseException, *, is_sent: bool) -> bool:
        """Whether this one says nothing of the pod, so that it is asked again at once.

        :param is_sent: whether the holder has the request, and is there, as :meth:`HolderDoor.look` has found.
        """
        if was_idle and isinstance(error, ConnectionError):
            return True  # it had been closed while it was not in use
        if not link.is_held or not isinstance(error, (OSError, http.client.HTTPException)):
            return False
        is_late = isinstance(error, TimeoutError)
        if is_late and is_sent:
            return False
        self._num_held += 1
        if is_late or self._num_held == _MOST_BROKEN:
            door.go_alone(str(error) or "it says nothing")
        return True  # it has ended, and another one is started


class PodChannel(PerProcess):
    """Requests to any pods. Picklable; the copy opens connections of its own.

    Raises the errors that pods answer with, and :class:`PodUnreachable` for whatever goes wrong on the way. Its detail
    ``silent`` says that the pod was reached, and that no answer came in time; ``handshake``, that TLS with it was begun
    and did not come to an end.

    :param held_for: the job for which requests go by way of the machine's connection holder; None: they don't.
    :param is_quick: whether no request takes long, so that none waits there for one that does.
    """

    OF_ONE_PROCESS = ("_of_thread", "heard_at")

    def __init__(
        self,
        credentials: Credentials,
        connect_timeout_seconds: float,
        *,
        held_for: str | None = None,
        is_quick: bool = False,
    ) -> None:
        self.credentials = credentials
        self.silent_seconds: float | None = None
        """A pod of which nothing is heard for so long, while TLS with it is begun, gives no sign of life; None: that
        may take as long as the request."""
        self._connect_timeout_seconds = connect_timeout_seconds
        self._held_for = held_for
        self._is_quick = is_quick
        self.most_links = _LEAST_LINKS
        self._begin_process()

    def asks_pods(self, count: int) -> None:
        """Fact: so many pods are asked, again and again."""
        self.most_links = max(self.most_links, count + _LEAST_LINKS)

    def was_heard(self, pod: str, within_seconds: float) -> bool:
        """Whether the pod has answered anything so short a while ago, over any connection of this process."""
        return time.monotonic() <= self.heard_at.get(pod, float("-inf")) + within_seconds

    def may_ask(self, pod: str, service_url: str) -> bool:
        """Whether a pod that the service has named may be sent the token, if there is one."""
        return self.credentials.may_be_shown(pod, service_url)

    def call(
        self,
        method: str,
        pod: str,
        path: str,
        wait: Wait,
        *,
        sent: Any = None,
        content: bytes = b"",
        params: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One request that is answered with a JSON object, or with nothing.

        :param sent: the body, to be sent as JSON; ``content``: the body as it is.
        """
        if params:
            path += ("&" if "?" in path else "?") + urlencode(params)
        headers = {"Content-Type": "application/json" if sent is not None else "application/octet-stream"}
        body = json.dumps(sent).encode() if sent is not None else content
        response, text = self._whole(method, pod, path, body, headers, wait)
        if response.status >= 300:
            if response.status < 400 and (to := response.getheader("Location")):
                raise InvalidInput(f"{pod} is no pod, but sends on to {to[:200]}: give the URL of the pods themselves")
            _raise_answer(response.status, text, pod + path)
        try:
            answer = decoded(text) if text else {}
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise not_of_a_pod(pod + path, repr(text[:100]))
        return answer

    def _whole(
        self, method: str, pod: str, path: str, body: bytes, headers: dict[str, str], wait: Wait
    ) -> tuple[Answer, bytes]:
        for is_last in (False, True):
            response = self._send(method, pod, path, body, headers, wait)
            is_held = self._links()[pod].is_held
            try:
                return response, self._text_of(response, pod)
            except BaseException as error:
                self.hang_up(pod)
                if is_held and not is_last and _is_broken_off(error):
                    continue  # it may be the holder that has ended
                if isinstance(error, (OSError, http.client.HTTPException)):
                    raise unreachable(pod, error) from error
                raise
        raise AssertionError("the last turn returns or raises")

    def fetch(self, pod: str, path: str, body: bytes, expected: Expected, wait: Wait) -> ReceivedBatch:
        """One POST that is answered with a frame."""
        return self._fetch(Asked(pod, path, body, expected), wait)

    def _fetch(self, asked: Asked, wait: Wait, *, is_again: bool = False) -> ReceivedBatch:
        coming = self._head_of(asked, wait, is_again=is_again)
        return self._rest_of(asked, wait, coming, is_again=is_again)

    def fetch_all(self, asked: list[Asked], wait: Wait) -> list[ReceivedBatch | RefillError]:
        """Several of these at once, each of another pod: all are sent before the head of the first answer is read, and
        all heads are read before the rest of the first: so they come into one buffer, as one answer would. An error
        stands in the place of an answer that did not come."""
        found: list[ReceivedBatch | RefillError] = []
        try:
            sent = [_tried(self._begin, "POST", each.pod, each.path, each.body, dict(_BINARY), wait) for each in asked]
            coming = [
                begun if isinstance(begun, RefillError) else _tried(self._head_of, each, wait, begun)
                for each, begun in zip(asked, sent, strict=True)
            ]
            sizes = [0 if isinstance(each, RefillError) else each.num_bytes for each in coming]
            frame, start = room_for(sum(sizes), ", ".join(each.pod for each in asked)), 0
            for each, begun, num_bytes in zip(asked, coming, sizes, strict=True):
                room = frame[start : start + num_bytes]
                found.append(
                    begun if isinstance(begun, RefillError) else _tried(self._rest_of, each, wait, begun, room)
                )
                start += num_bytes
        except BaseException:
            for each in asked[len(found) :]:
                self.hang_up(each.pod)  # its answer must not be taken for the next one's
            raise
        return found

    def fetch_together(self, asked: list[list[Asked]], wait: Wait) -> list[list[ReceivedBatch] | RefillError]:
        """As :meth:`fetch_all`, of batches of several jobs: those of a list are of one pod, and go as one request."""
        requests = []
        for every in asked:
            body = encode_together([(each.path, each.body) for each in every])
            expected = Expected(together=[each.expected for each in every])
            requests.append(Asked(every[0].pod, _BATCHES, body, expected))
        found: list[list[ReceivedBatch] | RefillError] = []
        for every, answer in zip(asked, self.fetch_all(requests, wait), strict=True):
            if isinstance(answer, RefillError):
                found.append(answer)
                continue
            ends = list(accumulate(each.expected.count for each in every))
            found.append([answer.part(first, end) for first, end in pairwise([0, *ends])])
        return found

    def _head_of(
        self, asked: Asked, wait: Wait, was_idle: bool | None = None, *, is_again: bool = False
    ) -> ComingFrame:
        """The answer to a request, as soon as it begins to come.

        :param was_idle: as that of :meth:`_send`.
        :param is_again: whether this is another try, after the holder may have broken it off.
        """
        response = self._send("POST", asked.pod, asked.path, asked.body, dict(_BINARY), wait, was_idle)
        link = self._links()[asked.pod]
        try:
            if response.status != 200:
                _raise_answer(response.status, self._text_of(response, asked.pod), asked.pod)
            link.takes(response.length or 0)
            return ComingFrame(response, asked.expected, asked.pod)
        except BaseException as error:
            if link.is_held and not is_again and _is_broken_off(error):
                self.hang_up(asked.pod)
                return self._head_of(asked, wait, is_again=True)
            self._is_broken(asked.pod, response, error)
            raise

    def _rest_of(
        self, asked: Asked, wait: Wait, coming: ComingFrame, room: memoryview | None = None, *, is_again: bool = False
    ) -> ReceivedBatch:
        """:param room: for all of it; None: it gets a buffer of its own."""
        link = self._links()[asked.pod]
        link.goes_on()
        try:
            return coming.read_into(room_for(coming.num_bytes, asked.pod) if room is None else room)
        except BaseException as error:
            if link.is_held and not is_again and _is_broken_off(error):
                self.hang_up(asked.pod)
                return self._fetch(asked, wait, is_again=True)
            self._is_broken(asked.pod, coming.response, error)
            raise

    def _is_broken(self, pod: str, response: Answer, error: BaseException) -> None:
        """Fact: so it went with an answer whose head has come. Raises :class:`PodUnreachable` for what went wrong on
        the way."""
        # Whatever is left of this answer must not be taken for the next one's; KeyboardInterrupt included.
        if not response.isclosed() or not isinstance(error, RefillError):
            self.hang_up(pod)
        if isinstance(error, (OSError, http.client.HTTPException)):
            raise unreachable(pod, error) from error

    def hang_up(self, pod: str) -> None:
        """The next request of this thread opens another connection."""
        link = self._links().pop(pod, None)
        if link is not None:
            link.close()

    def _send(
        self,
        method: str,
        pod: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        wait: Wait,
        was_idle: bool | None = None,
    ) -> Answer:
        """The answer's head has come, and its body is to be read.

        :param was_idle: what :meth:`_begin` found, of a request that is on its way; None: it is not.
        """
        breaks = _Breaks()
        while True:
            was_open = self._begin(method, pod, path, body, headers, wait) if was_idle is None else was_idle
            was_idle = None  # the next turn sends it anew
            link = self._links()[pod]
            try:
                _await_answer(link, pod, wait)
                response: Answer = link.getresponse()
                link.has_answered()
                if response.getheader(SAID_HEADER) is None:
                    self.heard_at[pod] = time.monotonic()
                if response.status == NotAuthenticated.status and self.credentials.were_refused(link.shown):
                    self._text_of(response, pod)
                    continue
                return response
            except BaseException as error:
                self.hang_up(pod)
                if breaks.says_nothing(link, was_open, error, is_sent=True):
                    continue
                if isinstance(error, (OSError, http.client.HTTPException)):
                    raise unreachable(pod, error) from error
                raise

    def _begin(self, method: str, pod: str, path: str, body: bytes, headers: dict[str, str], wait: Wait) -> bool:
        """The request is on its way; whether the connection was open before, so that the pod may have closed it."""
        links = self._links()
        breaks = _Breaks()
        while True:
            headers |= self.credentials.headers()
            link = links.pop(pod, None)
            was_idle = link is not None
            if link is None:
                for unused in list(links)[: 1 - self.most_links]:
                    self.hang_up(unused)
                link = self._new_link(pod)
            links[pod] = link  # now the one that was used last
            if isinstance(link, HolderLink):
                link.silent_seconds = self.silent_seconds
                link.lane = ALIVE_LANE if path == _ALIVE else QUICK_LANE if self._is_quick else DATA_LANE
            still_connects = partial(self._still_connects, pod, time.monotonic())
            link.shown = headers
            try:
                link.send_request(method, path, body, headers, wait.seconds, still_connects)
                return was_idle
            except BaseException as error:
                self.hang_up(pod)
                if breaks.says_nothing(link, was_idle, error, is_sent=False):
                    continue
                if isinstance(error, (OSError, http.client.HTTPException)):
                    raise unreachable(pod, error) from error
                raise

    def _new_link(self, pod: str) -> PodLink:
        if self._held_for is not None and not pod.startswith(UNIX) and (held := door.connect()) is not None:
            return HolderLink(pod, self.credentials, self._connect_timeout_seconds, held, self._held_for)
        return PodLink(pod, self.credentials, self._connect_timeout_seconds)

    def _still_connects(self, pod: str, began: float) -> None:
        """TLS takes the pod itself, which may have very many handshakes to do."""
        if self.silent_seconds is None or time.monotonic() < began + self.silent_seconds:
            return
        if not self.was_heard(pod, self.silent_seconds):
            raise no_sign_of_life(pod)

    def _text_of(self, response: Answer, pod: str) -> bytes:
        """The body of an answer in JSON."""
        most_bytes = _MOST_JSON_BYTES if response.status < 300 else _MOST_ERROR_BYTES
        if (response.length or 0) > most_bytes:
            self.hang_up(pod)
            raise not_of_a_pod(pod, f"{response.length:,} bytes with status {response.status}")
        self._links()[pod].takes(most_bytes)
        return response.read()

    def _links(self) -> dict[str, PodLink]:
        """Of this thread, the one that was used last at the end. Those of before a fork are not used: two processes
        must not share one."""
        self._own_process()
        if not hasattr(self._of_thread, "links"):
            self._of_thread.links = {}
        links: dict[str, PodLink] = self._of_thread.links
        return links

    def _begin_process(self) -> None:
        super()._begin_process()
        self._of_thread = threading.local()
        self.heard_at: dict[str, float] = {}


def _tried(what: Callable[..., Found], *of: Any) -> Found | RefillError:
    """What comes of it, or its error."""
    try:
        return what(*of)
    except RefillError as error:
        return error


def _await_answer(link: PodLink, pod: str, wait: Wait) -> None:
    """Until something comes, or the connection breaks."""
    coming = select.poll()
    coming.register(link.sock, select.POLLIN)
    ends = time.monotonic() + (link.most_seconds if isinstance(link, HolderLink) else wait.seconds)
    look_seconds = _FIRST_LOOK_SECONDS
    while not coming.poll(1000 * min(look_seconds, max(0.0, ends - time.monotonic()))):
        look_seconds = _LOOK_SECONDS
        if link.is_held:
            door.look()
        if time.monotonic() >= ends:
            raise TimeoutError
        wait.still_waits(pod)


def _raise_answer(status: int, body: bytes, source: str) -> NoReturn:
    try:
        answer = decoded(body)
    except ValueError:
        answer = body.decode("utf-8", "replace")
    raise error_from_wire(answer, status=status, source=source)


def _is_broken_off(error: BaseException) -> bool:
    return isinstance(error, (OSError, http.client.HTTPException)) and not isinstance(error, TimeoutError)
