"""How does a pod talk to the other pods? HTTP/2 with prior knowledge, one request for each owner and batch.

pyreqwest (Rust) against granian (Rust): about ten times httpx's HTTP/2 at a fifth of its CPU. The flow-control
windows are wide, so that a transfer is not throttled to window / round trip.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyreqwest.client import Client, ClientBuilder
from pyreqwest.exceptions import ConnectTimeoutError, PyreqwestError, RequestTimeoutError
from pyreqwest.request import RequestBuilder
from pyreqwest.response import Response, ResponseBodyReader

from refill.errors import (
    InvalidInput,
    NotAuthenticated,
    PodUnreachable,
    RefillError,
    error_from_wire,
)
from refill.pods.credentials import ShownToken
from refill.pods.pod_link import GONE_SECONDS, PROBE_AFTER_SECONDS
from refill.protocol.wire_format import FRAME_HEADER_BYTES, FrameHeader, Int64Array, decode_frame_arrays
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.payload import Damage
from refill_service.observing.tracing import REQUEST_ID_HEADER, current_request_id, trace_headers
from refill_service.peers.certificates import Certificates

log = logging.getLogger(__name__)

PODS_HEADER = "refill-pods"
"""How many pods there are, by the settings of the one that asks. While they are replaced by more or by fewer, an old
and a new one do not agree on who owns what, and must not talk."""
STREAM_WINDOW_BYTES = 16 << 20
CONNECTION_WINDOW_BYTES = 64 << 20
MAX_FRAME_BYTES = 1 << 20
_PIECE_NUMBERS = 1 << 17
_LOOK_SECONDS = 5.0
_UNUSABLE = (OSError, InvalidInput)
"""What certificates are that can't be read, or do not go together."""
_MOST_ANSWER_BYTES = 16 << 20
"""Of what is no stream of samples, unless more was asked for."""
_SHORT_BYTES = 16 << 10
"""Of an answer: so much is read at once."""
_JSON_TIMES = 20
"""As much as its bytes, JSON takes when it has been read: lists of short lists."""
_SAID_BYTES = 1_000
_MOST_SAMPLES = 1 << 20
"""In a frame, where nobody knows how many will come."""


@dataclass(frozen=True)
class BodyPieces:
    """Integers that are sent as int64, encoded piece by piece: there are no copies of them for each pod."""

    numbers: NDArray[np.signedinteger[Any]]

    @property
    def num_bytes(self) -> int:
        return 8 * len(self.numbers)

    async def pieces(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self.numbers), _PIECE_NUMBERS):
            yield self.numbers[start : start + _PIECE_NUMBERS].astype("<i8").tobytes()


Body = dict[str, Any] | bytes | BodyPieces | None
"""Of a small request: sent as JSON, as it is, or in pieces."""


@dataclass(frozen=True)
class Frame:
    """Samples as they came over the wire; ``payloads`` are views into the pieces that they came in, kept alive by them.

    A piece is about 1 MB, so one sample of a few bytes may hold that much: copy what is to stay."""

    positions: Int64Array
    sample_ids: Int64Array
    payloads: list[memoryview | Damage]


class FrameReader:
    """Reads the frames of one streamed answer without copying a sample that arrives whole."""

    def __init__(self, reader: ResponseBodyReader, source: str) -> None:
        self._reader = reader
        self._source = source
        self._piece = memoryview(b"")
        self.bytes_received = 0

    async def frame(self, most: int = _MOST_SAMPLES, check_bytes: Callable[[int], None] | None = None) -> Frame:
        """Raises :class:`PodUnreachable` when the stream ends too early, or announces more than ``most`` samples.

        :param check_bytes: called with the size of the payload before any of it is held, and may raise.
        """
        header = FrameHeader.decode(await self._exactly(FRAME_HEADER_BYTES))
        if header.count > most:
            raise PodUnreachable(f"{self._source} answers with {header.count:,} samples, more than the {most:,} it may")
        if check_bytes is not None:
            check_bytes(header.payload_bytes)
        positions, sample_ids, lengths = decode_frame_arrays(header, await self._exactly(header.arrays_bytes))
        payloads: list[memoryview | Damage] = []
        for length in lengths.tolist():
            if length < 0:
                payloads.append(Damage(await self._exactly(-length)))
            elif length <= len(self._piece):  # as below, but without the cost of a call for each small sample
                payloads.append(self._piece[:length])
                self._piece = self._piece[length:]
            else:
                payloads.append(await self._exactly(length))
        return Frame(positions, sample_ids, payloads)

    async def _exactly(self, count: int) -> memoryview:
        """The next ``count`` bytes: a view into the piece that they came in, or a copy when they came in several."""
        if count and not self._piece:
            await self._next_piece()
        if count <= len(self._piece):
            found, self._piece = self._piece[:count], self._piece[count:]
            return found
        buffer = np.empty(count, dtype=np.uint8).data  # not filled with zeros first
        filled = 0
        while filled < count:
            if not self._piece:
                await self._next_piece()
            part = self._piece[: count - filled]
            buffer[filled : filled + len(part)] = part
            filled += len(part)
            self._piece = self._piece[len(part) :]
        return buffer

    async def _next_piece(self) -> None:
        piece = await self._reader.read_chunk()  # as it came: read(n) would copy it
        if piece is None:
            raise PodUnreachable(f"{self._source} broke off its answer after {self.bytes_received} bytes")
        self._piece = memoryview(piece)
        self.bytes_received += len(piece)


class Peers:
    """The other pods, by ordinal. Close it when done.

    Names are resolved with each new connection: a pod that was replaced has its name and another address.

    :param token: shown to them; None: they want none.
    :param certificates: shown to them, and which theirs must be signed by; None: no TLS.
    :param connect_timeout_seconds: how long reaching one may take, TLS included.
    :param most_answers_bytes: of answers that are read at once, and of what becomes of them: others wait. A single one
        may be larger.
    """

    def __init__(
        self,
        peer_urls: tuple[str, ...],
        timeout_seconds: float,
        token: ShownToken | None = None,
        certificates: Certificates | None = None,
        *,
        connect_timeout_seconds: float = 2,
        most_answers_bytes: int = _MOST_ANSWER_BYTES,
    ) -> None:
        self.answers = ByteGate(most_answers_bytes, most_of_free=1)
        """What is read of answers that are no frames; one pod's leave room for those of others."""
        self.urls = peer_urls
        self._timeout_seconds = timeout_seconds
        self._connect_timeout_seconds = connect_timeout_seconds
        self._token = token
        self._certificates = certificates
        self._client: Client | None = None
        self._apart: Client | None = None
        """For signs of life: over the other's connection they would wait for the samples that are on their way."""
        self._made_of: object = None
        self._looked = 0.0

    def name(self, pod: int) -> str:
        return f"pod {pod} ({self.urls[pod]})"

    async def close(self) -> None:
        for client in (self._client, self._apart):
            if client is not None:
                await client.close()

    async def call(self, pod: int, method: str, path: str, body: Body = None, *, apart: bool = False) -> Any:
        """One small request; returns the decoded JSON answer, None when it is empty.

        :param apart: over a connection that no samples come over.
        """
        async with self._translated(pod):
            request = self._request(method, pod, path, apart=apart)
            if isinstance(body, dict):
                request = request.header("content-type", "application/json").body_bytes(json.dumps(body).encode())
            elif isinstance(body, BodyPieces):
                request = request.header("content-length", str(body.num_bytes)).body_stream(body.pieces())
            elif body is not None:
                request = request.body_bytes(body)
            async with request.build_streamed() as response, self._read(response, pod, _JSON_TIMES) as content:
                self._raise_for(response.status, content, self.name(pod))
                try:
                    return json.loads(content) if content else None
                except (ValueError, RecursionError):
                    raise PodUnreachable(f"{self.name(pod)} answers with what is no JSON") from None

    async def get_bytes(self, pod: int, path: str, most_bytes: int) -> bytes:
        """One request that is answered with so many bytes at most."""
        async with self._translated(pod):
            most_bytes = max(most_bytes, _MOST_ANSWER_BYTES)
            async with (
                self._request("GET", pod, path).build_streamed() as response,
                self._read(response, pod, most_bytes=most_bytes) as content,
            ):
                self._raise_for(response.status, content, self.name(pod))
                return content

    async def call_all(self, pods: list[int], method: str, path: str, body: Body) -> list[Any]:
        """The same small request to several pods at once; the first error is raised when all have answered."""
        calls = (self.call(pod, method, path, body) for pod in pods)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    @asynccontextmanager
    async def frames(self, pod: int, path: str, body: bytes) -> AsyncIterator[FrameReader]:
        """A request that is answered with frames, read one after another while they arrive."""
        async with self._translated(pod):
            request = self._request("POST", pod, path).body_bytes(body)
            async with request.build_streamed() as response:
                if response.status != 200:
                    async with self._read(response, pod) as content:
                        self._raise_for(response.status, content, self.name(pod))
                yield FrameReader(response.body_reader, self.name(pod))

    @asynccontextmanager
    async def _read(
        self, response: Response, pod: int, times: int = 1, most_bytes: int = _MOST_ANSWER_BYTES
    ) -> AsyncIterator[bytes]:
        """All of an answer, which counts while this lasts, but for a short one.

        :param times: as much as its bytes, it counts.
        """
        content = bytearray()
        async with AsyncExitStack() as stack:
            is_inside = False
            while (piece := await response.body_reader.read_chunk()) is not None:
                content += piece
                if len(content) > most_bytes:
                    raise PodUnreachable(
                        f"{self.name(pod)} answers with more than the {most_bytes:,} bytes that it may"
                    )
                if not is_inside and len(content) > _SHORT_BYTES:
                    is_inside = True
                    said = response.headers.get("content-length", "")  # which the stream ends at
                    expected = min(int(said), most_bytes) if said.isdigit() else most_bytes
                    await stack.enter_async_context(self.answers.passage(times * expected, pod))
            yield bytes(content)

    def _request(self, method: str, pod: int, path: str, *, apart: bool = False) -> RequestBuilder:
        client = self._connection()
        if apart:
            client = self._apart = self._apart or self._made()
        request = client.request(method, self.urls[pod] + path)
        for name, value in self._headers().items():
            request = request.header(name, value)
        return request

    def _headers(self) -> dict[str, str]:
        headers = trace_headers() | {PODS_HEADER: str(len(self.urls))}
        if request_id := current_request_id():
            headers[REQUEST_ID_HEADER] = request_id
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token.text()}"
        return headers

    def _connection(self) -> Client:
        """A new one when certificates were replaced; what is under way ends with the old one."""
        now = time.monotonic()
        if self._client is None or (self._certificates is not None and now > self._looked + _LOOK_SECONDS):
            self._looked = now
            try:
                made_of = None if self._certificates is None else self._certificates.state()
                if self._client is None or made_of != self._made_of:
                    self._client, self._apart, self._made_of = self._new_client(), None, made_of
            except _UNUSABLE as error:  # they are being replaced
                if self._client is None:
                    raise PodUnreachable(f"certificates for other pods can't be used: {error}") from error
        return self._client

    def _made(self) -> Client:
        try:
            return self._new_client()
        except _UNUSABLE as error:  # certificates are being replaced
            raise PodUnreachable(f"certificates for other pods can't be used: {error}") from error

    def _new_client(self) -> Client:
        builder = (
            ClientBuilder()
            .http2_initial_stream_window_size(STREAM_WINDOW_BYTES)
            .http2_initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .http2_max_frame_size(MAX_FRAME_BYTES)
            .http2_keep_alive_interval(timedelta(seconds=10))
            .http2_keep_alive_timeout(timedelta(seconds=20))
            .no_proxy()
            .gzip(False)
            .brotli(False)
            .zstd(False)
            .deflate(False)
            # A network that drops packets says nothing of a pod that has gone. One that is busy or paused is still
            # there: its machine confirms what comes.
            .tcp_user_timeout(timedelta(seconds=GONE_SECONDS))
            .tcp_keepalive(timedelta(seconds=PROBE_AFTER_SECONDS))
            .tcp_keepalive_interval(timedelta(seconds=1))
            .tcp_keepalive_retries(GONE_SECONDS - PROBE_AFTER_SECONDS)
            .connect_timeout(timedelta(seconds=self._connect_timeout_seconds))
            .timeout(timedelta(seconds=self._timeout_seconds))
        )
        if self._certificates is None:
            return builder.http2_prior_knowledge().build()
        files = self._certificates
        assert files.ca is not None
        files.context()  # a key that belongs to its certificate, and an authority, or the client before goes on
        # HTTP/2 by ALPN.
        builder = builder.http2(True).https_only(True).min_tls_version("TLSv1.3")
        builder = builder.add_root_certificate_pem(files.ca.read_bytes())
        try:
            return builder.identity_pem(files.cert.read_bytes() + b"\n" + files.key.read_bytes()).build()
        except ValueError as error:  # replaced since it was looked at
            raise InvalidInput(f"{files.cert}, {files.key} and {files.ca} do not go together: {error}") from error

    def _raise_for(self, status: int, content: bytes, source: str) -> None:
        if status < 400:
            return
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = content[:_SAID_BYTES].decode(errors="replace")
        error: RefillError = error_from_wire(answer, status=status, source=source)
        if status == NotAuthenticated.status:  # whatever it names itself: it is of none of these pods
            # A Secret that was replaced reaches one pod before another. Whoever asked this pod comes again.
            if self._token is not None:
                self._token.was_refused(self._token.text())
            raise PodUnreachable(f"{source} does not take this pod's token: {error.message}")
        raise error

    @asynccontextmanager
    async def _translated(self, pod: int) -> AsyncIterator[None]:
        try:
            yield
        except PyreqwestError as error:
            raise PodUnreachable(
                f"{self.name(pod)} does not answer: {self._cause(error)}. Is it running, and is the URL right?",
                pod=pod,
                url=self.urls[pod],
            ) from error

    def _cause(self, error: PyreqwestError) -> str:
        if isinstance(error, ConnectTimeoutError):
            return f"it can't be reached within {self._connect_timeout_seconds:g} s"
        if isinstance(error, RequestTimeoutError):
            return f"no answer within {self._timeout_seconds:g} s"
        return _root_cause(error)


_CONNECTING_ENDED = "another request, whose connection this one was to share, was given up before it was connected"


def _root_cause(error: PyreqwestError) -> str:
    causes = getattr(error, "details", None) or {}
    texts = [str(cause.get("message", "")) for cause in causes.get("causes") or []]
    found = texts[-1] if texts else str(error)
    return _CONNECTING_ENDED if found == "request was canceled" else found
