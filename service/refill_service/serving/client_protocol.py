"""How long, and with how much, may a client keep a connection busy? uvicorn's HTTP/1.1, with limits.

It is the client's turn when its request is not whole yet, or when bytes for it wait in the transport's buffer. Then it
has to move 64 KiB, or all that is left, within ``timeout_seconds``, and all of it at a pace (:mod:`.pace`); else the
connection is aborted, and what was held for it freed. Address and headers have a length and a number that is enough for
anybody, as has what surrounds a body (chunk sizes, trailers). The parser, httptools, has limits for none of these.

What a connection can have a pod hold before its request is understood is little, or charged to whose it is: bytes are
read in small pieces, of a body no more than one before its route asks for it; a head is charged when it is longer than
heads are; and of requests that come before the answer to the one before, one is taken in.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from refill.errors import HeadersTooLarge, InvalidInput, PodBusy, RefillError
from refill_service.cache_core.shared_room import Asker, SharedRoom
from refill_service.cache_core.team_quotas import TeamQuotas
from refill_service.memory.loop_turns import COMERS, STRANGERS, LoopTurns
from refill_service.peers.certificates import Certificates
from refill_service.pod.cache_node import RequestCounts
from refill_service.serving.batch_door import AnsweredNow, BatchAtOnce, KnownHead, is_batch
from refill_service.serving.door import CONNECTION, OVER_LIMIT, asks_for_batches
from refill_service.serving.listener import ConnectionRoom, Listener, listening_at, listening_on
from refill_service.serving.other_end import bytes_in_kernel, has_confirmed, is_of_proxy, is_watched
from refill_service.serving.request_guard import (
    ANSWER,
    LEAST_BYTES,
    LEAST_BYTES_PER_SECOND,
    Pace,
    wire_answer,
)

log = logging.getLogger(__name__)

HEADERS_BYTES = 32 << 10
_MOST_HEADERS = 100
_READ_BYTES = 16 << 10
"""At once, of a connection. Less than a head may have, so that two heads in one piece are none that is too long."""
_FIRST_READ_BYTES = 4 << 10
"""Of a request: it is held until its turn comes, and charged to nobody. Most are no longer."""
_HEAD_COPIES = 4
"""As which a pod holds an address: as it came, its path, decoded, and what routes make of it."""
_HEADER_BYTES = 200
"""Of Python's objects, beside its letters."""
_FREE_HEAD_BYTES = 8 << 10
"""Of what a head costs, so much is not charged: those of training processes, probes and browsers."""
_STRANGER_SECONDS = 10
"""A connection that has not shown who it is may be idle so long: a probe asks at once."""
_LOOK_SECONDS = 1.0
"""Who is slow."""
_LOOKS_AT_CERTIFICATES = 5
"""So many looks make one at certificates."""
_LAST_LOOK_SECONDS = 0.1
"""While a server ends."""


@dataclass
class ClientLimits:
    """What clients may do, the same on all addresses that a pod serves them on.

    :param requests: room for what is held of requests.
    :param turns: in which requests are understood, and answered.
    """

    timeout_seconds: float
    max_connections: int
    max_tls_connections: int
    counts: RequestCounts
    quotas: TeamQuotas
    requests: SharedRoom
    turns: LoopTurns


class ClientServer(uvicorn.Server):
    """uvicorn, which cuts off slow clients; without its signal handlers: the pod has its own, which stop all servers.

    :param certificates: for TLS, and read again when they are replaced; None: no TLS.
    :param at_once: answers what it can as soon as it has come, beside the application; None: nobody does.
    :param comers: in whose turn the first piece of what comes on a connection is read, which shows who it is.
    :param options: of :class:`uvicorn.Config`: the application and the address.
    """

    def __init__(
        self,
        limits: ClientLimits,
        certificates: Certificates | None = None,
        at_once: BatchAtOnce | None = None,
        comers: str = COMERS,
        **options: Any,
    ) -> None:
        self._limits = limits
        self._unix_socket: str | None = options.pop("uds", None)
        self._certificates = certificates
        if certificates is not None:
            self._made_of = certificates.state()
            options |= {"ssl_certfile": certificates.cert, "ssl_keyfile": certificates.key}
        self._look_seconds = min(_LOOK_SECONDS, limits.timeout_seconds / 4)
        self._ends = asyncio.Event()
        most = limits.max_connections if certificates is None else limits.max_tls_connections
        room = ConnectionRoom(most, limits.quotas)
        read_into = memoryview(bytearray(_READ_BYTES))

        def new_protocol(**rest: Any) -> _SmallReads:
            return _SmallReads(_LimitedProtocol(limits, room, at_once, comers, **rest), limits.turns, read_into)

        self._protocol = new_protocol
        super().__init__(uvicorn.Config(http=new_protocol, **options))  # type: ignore[arg-type]

    def end(self) -> None:
        """Connections end when they have their answers."""
        self.should_exit = True
        self._ends.set()

    async def main_loop(self) -> None:
        """In place of uvicorn's, which wakes ten times a second: that was most of what a pod did that nobody asked."""
        for look in itertools.count():
            if await self.on_tick(0):  # which sets the date, too
                return
            self.cut()
            if self._certificates is not None and look % _LOOKS_AT_CERTIFICATES == 0:
                self._take_new(self._certificates)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_seconds):
                    await self._ends.wait()

    def _take_new(self, certificates: Certificates) -> None:
        """Connections from now on see the certificate that the files hold now."""
        try:
            made_of = certificates.state()
            if made_of != self._made_of and self.config.ssl is not None:
                certificates.context()  # a key that is of another certificate would be lost with the one that is there
                self.config.ssl.load_cert_chain(certificates.cert, certificates.key)
                self._made_of = made_of
        except (OSError, ssl.SSLError, InvalidInput):
            return  # they are being replaced

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Clients have the same limits to the end."""
        cutting = asyncio.create_task(self._cut_again_and_again())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut_again_and_again(self) -> None:
        while True:
            self.cut()
            await asyncio.sleep(_LAST_LOOK_SECONDS)

    def cut(self) -> None:
        """Cuts off clients that are slow, and connections that are closed but for the client's word."""
        now = time.monotonic()
        for connection in list(self.server_state.connections):
            if not isinstance(connection, _LimitedProtocol):
                continue
            try:
                is_slow, is_over = connection.is_slow(now), connection.is_half_closed()
            except Exception:  # of one client: the server would end by it, and the pod
                log.exception("a client's connection is cut off, since nobody can tell how it is")
                is_slow, is_over = False, True
            if is_slow:
                self._limits.counts.connections_cut += 1
            if is_slow or is_over:
                connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """In place of uvicorn's: connections come in by turns, TLS handshakes are bounded, and a Unix socket takes no
        descriptors. ``sockets``: one that listens already, in place of the address."""
        config = self.config
        if self._unix_socket is not None:
            listening = listening_at(self._unix_socket, config.backlog)
        elif sockets:
            (listening,) = sockets
        else:
            listening = listening_on(config.host, config.port, config.backlog)
        found = Listener(listening, config.ssl, self._new_connection, self._limits.turns)
        self.servers = [cast(asyncio.Server, found)]
        self.started = True

    def _new_connection(self) -> asyncio.BufferedProtocol:
        return self._protocol(config=self.config, server_state=self.server_state, app_state={})

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _SmallReads(asyncio.BufferedProtocol):
    """Gives a protocol what comes, in pieces, each in its team's turn. Until then nothing more is read.

    A transport that chooses itself reads 256 KB at once.

    :param read_into: one for all connections: what is read is taken out before the next read.
    """

    def __init__(self, protocol: _LimitedProtocol, turns: LoopTurns, read_into: memoryview) -> None:
        self._read_into = read_into
        self._turns = turns
        self._protocol = protocol
        self._waiting = b""
        """What has come and was not given to the protocol."""
        self._reads_since = 0
        self._is_for_batches = False

    def connection_made(self, transport: Any) -> None:
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting = b""
        self._protocol.connection_lost(exc)
        del self._protocol  # whoever holds on to this would be garbage in a circle

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def eof_received(self) -> None:
        self._protocol.eof_received()

    def get_buffer(self, sizehint: int) -> memoryview:
        self._reads_since = time.thread_time_ns()
        return self._read_into[:_FIRST_READ_BYTES] if self._protocol.is_between_requests else self._read_into

    def buffer_updated(self, nbytes: int) -> None:
        waits_already = bool(self._waiting)
        self._waiting += self._read_into[:nbytes]
        took = time.thread_time_ns() - self._reads_since
        if waits_already or not self._turns.call(self._protocol.team, self._give, self._is_dear, took):
            self._protocol.flow.pause_reading()

    def _give(self) -> None:
        given, self._waiting = self._waiting, b""
        if given and not self._protocol.transport.is_closing():
            self._protocol.flow.resume_reading()
            self._protocol.data_received(given)
            self._protocol.has_come()
            self._is_for_batches = self._protocol.asks_for_batches

    def _is_dear(self) -> bool:
        return not self._is_for_batches


class _LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with a limit for whatever a client can make a pod hold or wait for."""

    _was_closed = False

    def __init__(
        self,
        limits: ClientLimits,
        room: ConnectionRoom,
        at_once: BatchAtOnce | None,
        comers: str,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self._limits = limits
        self._at_once = at_once
        self._may_be_at_once = False
        self._known: KnownHead | None = None
        """Of the batch that was answered at once last."""
        self._untouched: dict[str, Any] = {}
        """Of a batch that may be answered at once, the scope as it began."""
        self._not_begun: tuple[RequestResponseCycle, Any] | None = None
        """A batch whose body is not known to be there."""
        self._when_written: Callable[[], None] | None = None
        """What is to be done when the answer under way has left."""
        self._room = room
        self._holder = Asker()
        """Whom the head of the request under way is charged to: strangers, until it is known."""
        self._held_bytes = 0
        self.team: str | None = comers
        """Whose turn it is when a request of it is read."""
        self.asks_for_batches = False
        """As far as requests were read."""
        self._made = time.monotonic()
        self.timeout_keep_alive = _STRANGER_SECONDS
        self._over_limit = False
        self.headers = []  # uvicorn's is None until a request begins: an empty line may come before the first
        self._refusal: RefillError | None = None
        """Nothing more is read."""
        self._wrong: RefillError | None = None
        """What the parser stops for now."""
        self._is_lost = False
        self._under_way = 0
        """Requests that are being answered, also when nobody is there any more."""
        self.has_asked = False
        """A request of it has been answered."""
        self._piece = b""
        """That is being understood."""
        self._piece_bytes = 0
        self._asking: Pace | None = None
        """Of the request that is not whole yet."""
        self._message_bytes = 0
        self._body_bytes = 0
        self._head_bytes = 0
        self._is_in_body = False
        self._sending_since = 0.0
        self._to_send_bytes = 0
        self._answered_first: RequestResponseCycle | None = None
        """The request before the one that was read last, if that waits for its answer."""
        self._when_lost: list[Callable[[], None]] = []
        self.passes_on = False
        """Whether a proxy, or a connection holder, asks over it for others."""

    def is_slow(self, now: float) -> bool:
        """Asked every now and then: whether the client has used up its time."""
        return self._sends_slowly(now) or self._reads_slowly(now) or self._says_nothing(now)

    def is_half_closed(self) -> bool:
        """Asked every now and then: closed here, with all sent, by the last look already. What is waited for is the TLS
        goodbye of the client, and one that is idle says none before its next request."""
        closed_before, self._was_closed = self._was_closed, self._is_closed_and_sent()
        return closed_before and self._was_closed

    def _is_closed_and_sent(self) -> bool:
        return (
            self.transport.is_closing()
            and self.transport.get_write_buffer_size() == 0
            and bytes_in_kernel(self.transport.get_extra_info("socket")) == 0
        )

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_between_requests(self) -> bool:
        return self._asking is None or self._message_bytes == 0

    def give_way(self) -> None:
        self.transport.abort()

    def belongs_to(self, team: str) -> bool:
        """A request has shown who this is; False: they have as many connections as they may, and it is closed."""
        if not self._room.belongs_to(self, team):
            self.cycle.keep_alive = False
            return False
        self.team = team
        self.timeout_keep_alive = self.config.timeout_keep_alive
        if not self._is_lost:
            self.transport.set_write_buffer_limits()
        held_bytes, holder = self._held_bytes, Asker(team)
        if held_bytes and holder != self._holder:
            self._hold(-held_bytes)
            self._holder = holder
            self._hold(held_bytes)
        self._holder = holder
        return True

    def has_come(self) -> None:
        """Fact: something of it was read. It is a stranger's, unless a request has shown more."""
        if self.team is COMERS:
            self.team = STRANGERS

    def when_lost(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called once, when the connection is gone; or the machine at its other end, soon after. At once
        where the connection is gone already: who has asked may have left before its turn came."""
        if self._is_lost:
            tell()
            return
        if not self._when_lost:
            is_watched(self.transport.get_extra_info("socket"))
        self._when_lost.append(tell)

    def is_answered(self) -> bool:
        """Whether the machine at its other end is there, as far as is known."""
        return not self._is_lost and has_confirmed(self.transport.get_extra_info("socket"))

    def _says_nothing(self, now: float) -> bool:
        return (
            not self.has_asked
            and self.cycle is None
            and not self.flow.read_paused  # until it is its turn
            and now > self._made + min(_STRANGER_SECONDS, self._limits.timeout_seconds)
        )

    def _sends_slowly(self, now: float) -> bool:
        if self._asking is None:
            return False
        if self.flow.read_paused:
            self._asking = self._pace(now)  # it is not let
            return False
        return now > self._asking.ends

    def _reads_slowly(self, now: float) -> bool:
        to_send = self.transport.get_write_buffer_size()
        if to_send:
            to_send += bytes_in_kernel(self.transport.get_extra_info("socket"))
        if to_send == 0 or self._to_send_bytes == 0 or to_send <= self._to_send_bytes - LEAST_BYTES:
            self._sending_since, self._to_send_bytes = now, to_send
        answer = None if self.cycle is None else cast(dict[str, Any], self.cycle.scope).get(ANSWER)
        if answer is not None and answer.waited_too_long(self._limits.timeout_seconds, now):
            return True
        return now > self._sending_since + self._limits.timeout_seconds

    def _pace(self, now: float) -> Pace:
        return Pace(self._limits.timeout_seconds, now)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_READ_BYTES)  # of those who don't read what they are answered
        self._asking = self._pace(time.monotonic())
        self._over_limit = not self._room.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._leave_if_over()
        self._hold(-self._held_bytes)
        if self.cycle is not None:
            self.cycle.disconnected = self.cycle.disconnected or not self.cycle.response_complete
        self._not_begun = None
        self._was_written()
        self._unset_keepalive_if_required()  # uvicorn leaves it running, and all that it holds, after an error
        for tell in self._when_lost:
            tell()
        self._when_lost.clear()
        if self._answered_first is not None:  # uvicorn tells the last one only
            self._answered_first.disconnected = True
            self._answered_first.message_event.set()
            if self.pipeline:  # one that is never begun keeps this, which keeps it
                self.pipeline.clear()
                self.cycle, self.scope = self._answered_first, cast(Any, None)
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        self._to_send_bytes = 0  # all but a little has left
        super().resume_writing()
        self._was_written()

    def _was_written(self) -> None:
        if self._when_written is not None:
            is_sent, self._when_written = self._when_written, None
            is_sent()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or (self._asking is None and self._answers_again(data)):
            return
        now = time.monotonic()
        if self._asking is None:
            self._asking = self._pace(now)
        self._asking.moved(len(data), now)
        self._piece_bytes = len(data)
        self._message_bytes += len(data)
        self._piece = data
        super().data_received(data)
        self._piece = b""
        self._begin()
        if self._refusal is not None or self.transport.is_closing():
            return
        if self._message_bytes - self._body_bytes > HEADERS_BYTES + self._body_bytes:
            self._refuse(_too_long())
        elif self._asking is not None and not self._is_in_body:
            self._hold_head(self._message_bytes)
            if self._wrong is not None:
                self._refuse(self._wrong)
        elif self._asking is not None and self.cycle.body and not self.cycle.response_complete:
            self.flow.pause_reading()  # until the route asks for what has come

    def on_message_begin(self) -> None:
        if self.pipeline:
            self._stop(InvalidInput("more requests came than one before the answer to the one before: wait for it"))
        self._asking = self._pace(time.monotonic())
        self._to_send_bytes = 0  # whoever asks again has read the answer before
        self._body_bytes = self._head_bytes = 0
        self._message_bytes = self._piece_bytes  # the end of the one before may be in it, too
        self._is_in_body = False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._measure_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._measure_head(len(name) + len(value))
        super().on_header(name, value)

    def _measure_head(self, more_bytes: int) -> None:
        """What came in one piece is not seen while it comes."""
        self._head_bytes += more_bytes
        if self._head_bytes > HEADERS_BYTES:
            self._stop(_too_long())
        if len(self.headers) >= _MOST_HEADERS:
            self._stop(HeadersTooLarge(f"the request has more than {_MOST_HEADERS} headers"))
        self._hold_head(self._head_bytes)
        if self._wrong is not None:
            self._stop(self._wrong)

    def _stop(self, error: RefillError) -> NoReturn:
        """The parser ends by it, and calls :meth:`send_400_response`."""
        self._wrong = error
        raise error

    def _hold_head(self, head_bytes: int) -> None:
        """Fact: so much of a head has come."""
        cost = _HEAD_COPIES * head_bytes + _HEADER_BYTES * len(self.headers) - _FREE_HEAD_BYTES
        more_bytes = cost - self._held_bytes
        if more_bytes <= 0:
            return
        if self._limits.requests.fits(self._holder, more_bytes, has_bytes=self._held_bytes):
            self._hold(more_bytes)
        else:
            self._wrong = PodBusy("the pod holds as many bytes of addresses and headers of requests as it takes")

    def _hold(self, more_bytes: int) -> None:
        if more_bytes:
            self._limits.requests.hold(self._holder, more_bytes)
            self._held_bytes += more_bytes

    def on_headers_complete(self) -> None:
        before = self.cycle
        self._may_be_at_once = (
            self._at_once is not None
            and self.team not in (COMERS, STRANGERS)
            and not self._over_limit
            and is_batch(self.parser.get_method(), self.url)
        )
        super().on_headers_complete()
        self._may_be_at_once = False
        self._is_in_body = True
        if self.pipeline:
            self._answered_first = before
        if self.cycle is None:
            return
        if not self.has_asked:
            self.passes_on = is_of_proxy(self.headers)
        scope = cast(dict[str, Any], self.cycle.scope)
        if self._not_begun is not None:
            self._untouched = dict(scope)
        scope[CONNECTION] = self
        self.asks_for_batches = asks_for_batches(scope["path"])
        if self._over_limit:
            scope[OVER_LIMIT] = self._room.limit
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._may_be_at_once:  # its body comes with its head
            self._not_begun = cycle, app
        else:
            self._start(cycle, app)

    def _start(self, cycle: RequestResponseCycle, app: Any) -> None:
        async def answers(*asked: Any) -> None:
            try:
                await app(*asked)
            finally:
                self._under_way -= 1
                self._leave_if_over()

        self._under_way += 1
        super()._start_asgi_task(cycle, answers)

    def _leave_if_over(self) -> None:
        """Who hangs up counts until what was asked for has ended: they could have any number of requests answered."""
        if self._is_lost and not self._under_way:
            self._room.leave(self)

    def _begin(self) -> None:
        """What waited for its body takes its way."""
        if self._not_begun is not None:
            begun, self._not_begun, self._untouched = self._not_begun, None, {}
            self._start(*begun)

    def on_message_complete(self) -> None:
        self._asking = None
        self._message_bytes = self._body_bytes = 0
        self._is_in_body = False
        super().on_message_complete()
        if self._not_begun is not None and self._at_once is not None:
            cycle = self._not_begun[0]
            answered = self._at_once.answer(cast(dict[str, Any], cycle.scope), bytes(cycle.body), self)
            if answered is None:
                self._begin()
            else:
                self._not_begun = None
                self._known = self._known_head(cycle)
                self._answered(cycle, answered)
        self._forget_what_is_over()

    def _known_head(self, cycle: RequestResponseCycle) -> KnownHead | None:
        """Of a batch that came in one piece and is being answered at once; None: it can't be told from its bytes."""
        scope, self._untouched = self._untouched, {}
        if not cycle.keep_alive or cycle.waiting_for_100_continue or not self._costs_nothing(scope["headers"]):
            return None
        return KnownHead.of(self._piece, bytes(cycle.body), scope)

    def _costs_nothing(self, headers: list[tuple[bytes, bytes]]) -> bool:
        return _HEAD_COPIES * self._head_bytes + _HEADER_BYTES * len(headers) <= _FREE_HEAD_BYTES

    def _answers_again(self, data: bytes) -> bool:
        """Whether this was a batch with the same head as the one before, and is answered now: a rank's all have it, and
        to take it apart again would take as long as the answer. All checks are made anew. False: nothing was done."""
        known, at_once = self._known, self._at_once
        if known is None or at_once is None or self.cycle is not None or (body := known.body_in(data)) is None:
            return False
        scope = known.scope(len(body)) | {CONNECTION: self}
        self.cycle = cycle = RequestResponseCycle(
            scope=cast(Any, scope),
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=self.on_response_complete,
        )
        cycle.more_body = False
        answered = at_once.answer(scope, body, self)
        if answered is None:
            self.cycle = cast(Any, None)
            return False
        self._unset_keepalive_if_required()
        self._to_send_bytes = 0  # whoever asks again has read the answer before
        self._answered(cycle, answered)
        self._forget_what_is_over()
        return True

    def _answered(self, cycle: RequestResponseCycle, answered: AnsweredNow) -> None:
        cycle.response_started = True
        scope = cast(dict[str, Any], cycle.scope)
        scope[ANSWER] = _Written(len(answered.content))

        def is_sent() -> None:
            answered.sent()
            if not cycle.disconnected:
                cycle.response_complete = True
                if not cycle.keep_alive:
                    self.transport.close()
                self.on_response_complete()

        content = answered.content
        if not cycle.keep_alive:
            content = content.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
        self.transport.write(content)
        if self.flow.write_paused:
            self._when_written = is_sent
        else:
            is_sent()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.has_asked = True
        self._forget_what_is_over()

    def _forget_what_is_over(self) -> None:
        """An idle connection holds nothing of its last request, but for a batch's head that costs nothing; one whose
        rest is still coming, no more than that."""
        if self.cycle is None or not self.cycle.response_complete:
            return
        self.cycle.body = bytearray()
        if self._asking is None:
            nothing: Any = None
            self.cycle = self.scope = nothing
            self.headers, self.url = [], b""
            self._hold(-self._held_bytes)
            # Where it was answered before its end, nothing ends the connection yet.
            if self.timeout_keep_alive_task is None and not self.transport.is_closing():
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    def send_400_response(self, msg: str) -> None:
        wrong = self._wrong or InvalidInput("that is no HTTP request")
        wrong.__traceback__ = None  # it keeps frames, which keep it and this connection: circular garbage
        self._refuse(wrong)

    def _refuse(self, error: RefillError) -> None:
        """Nothing that follows on this connection is understood. An answer that is being sent may end first."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = error
        if self.cycle is not None and not self.cycle.response_complete:
            self._answer_only_what_is_whole()
            return
        self._limits.counts.by_status[error.status] += 1
        status, headers, body = wire_answer(error)
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode(), b"connection: close"]
        lines += [name + b": " + value for name, value in headers]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()

    def _answer_only_what_is_whole(self) -> None:
        if self.cycle.more_body or self.pipeline:
            self.transport.abort()
        else:
            self.cycle.keep_alive = False
            self.flow.pause_reading()


class _Written:
    """An answer that was written whole, and waits to be taken."""

    def __init__(self, num_bytes: int) -> None:
        self._since = time.monotonic()
        self._num_bytes = num_bytes

    def waited_too_long(self, timeout_seconds: float, now: float) -> bool:
        return now > self._since + timeout_seconds + self._num_bytes / LEAST_BYTES_PER_SECOND


def _too_long() -> HeadersTooLarge:
    return HeadersTooLarge(f"address and headers are longer than {HEADERS_BYTES} bytes")
