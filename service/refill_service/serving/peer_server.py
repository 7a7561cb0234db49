"""What do other pods talk to? granian's HTTP/2: with prior knowledge, or by ALPN over TLS with certificates of both.

What it holds of a connection that nobody reads is bounded, and so is the number of them (:mod:`.silent_peers`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP2Settings
from granian.server.embed import Server
from starlette.types import ASGIApp

from refill.errors import InvalidInput
from refill_service.peers.certificates import Certificates
from refill_service.peers.peers import MAX_FRAME_BYTES
from refill_service.serving.request_guard import SEND_BUFFER_BYTES
from refill_service.serving.silent_peers import MOST_SILENT
from refill_service.settings import Settings

log = logging.getLogger(__name__)

_MOST_STREAMS = 128
"""Requests of one connection at once. A pod that has more to ask waits until one of them was answered."""
_HEADERS_BYTES = 16 << 10
_STREAM_WINDOW_BYTES, _CONNECTION_WINDOW_BYTES = 64 << 10, 128 << 10
"""Of requests, most of which are lists of positions: it may come before anybody has asked for it."""
_PING_SECONDS = 10
_LOOK_SECONDS = 5.0


class PeerServer:
    """Runs the HTTP/2 server for other pods until it is stopped.

    :param certificates: for TLS, and those that other pods' must be signed by; None: no TLS. When they are replaced,
        another server takes over the port: requests under way are broken off, and other pods make them again.
    """

    def __init__(self, app: ASGIApp, settings: Settings, certificates: Certificates | None) -> None:
        self._app = app
        self._settings = settings
        self._certificates = certificates
        self._server: Server | None = None
        self._stopped = False

    async def serve(self) -> None:
        while not self._stopped:
            self._server = self._new()
            serving = asyncio.create_task(self._server.serve())
            if self._certificates is not None:
                await self._until_replaced(self._certificates, serving)
                if not serving.done():
                    log.info("certificates for other pods were replaced: the server for them starts anew")
                    self._server.stop()  # type: ignore[no-untyped-call]
            await serving
            if self._certificates is None:
                return

    def stop(self) -> None:
        self._stopped = True
        if self._server is not None:
            self._server.stop()  # type: ignore[no-untyped-call]

    async def _until_replaced(self, certificates: Certificates, serving: asyncio.Task[None]) -> None:
        """Or until the server ends."""
        made_of = certificates.state()
        while not serving.done():
            await asyncio.wait([serving], timeout=_LOOK_SECONDS)
            try:
                if certificates.state() != made_of:
                    certificates.context()  # a key that belongs to its certificate, or the old one goes on
                    return
            except (OSError, InvalidInput):
                continue  # they are being replaced

    def _new(self) -> Server:
        files = self._certificates
        tls: dict[str, Any] = {}
        if files is not None:
            tls = {"ssl_cert": files.cert, "ssl_key": files.key, "ssl_ca": files.ca, "ssl_client_verify": True}
        return Server(
            self._app,
            address=self._settings.host,
            port=self._settings.peer_port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http2,
            # Connections, of which another pod needs one, and those that end soon.
            backpressure=self._settings.max_connections + 2 * MOST_SILENT,
            backlog=2 * MOST_SILENT,
            http2_settings=HTTP2Settings(
                initial_stream_window_size=_STREAM_WINDOW_BYTES,
                initial_connection_window_size=_CONNECTION_WINDOW_BYTES,
                max_concurrent_streams=_MOST_STREAMS,
                max_frame_size=MAX_FRAME_BYTES,
                max_send_buffer_size=SEND_BUFFER_BYTES,
                max_headers_size=_HEADERS_BYTES,
                keep_alive_interval=_PING_SECONDS * 1000,
                keep_alive_timeout=2 * _PING_SECONDS,
            ),
            log_enabled=False,
            **tls,
        )
