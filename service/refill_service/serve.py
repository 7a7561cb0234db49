"""How does a pod run? Its servers share one event loop: uvicorn's for clients, granian's HTTP/2 for peers."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP2Settings
from granian.server.embed import Server as PeerServer

from refill.errors import InvalidInput
from refill_service.app import client_app, peer_app
from refill_service.cache_node import CacheNode
from refill_service.peers import CONNECTION_WINDOW_BYTES, MAX_FRAME_BYTES, STREAM_WINDOW_BYTES
from refill_service.settings import Settings

__all__ = ["serve"]

log = logging.getLogger(__name__)

_M_ARENA_MAX = -8


def serve(settings: Settings) -> None:
    """Run a pod until SIGTERM or SIGINT."""
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for port in (settings.port, settings.peer_port):
        _check_free(settings.host, port)
    unix_sockets = [settings.unix_socket, f"{settings.unix_socket}.memory"] if settings.unix_socket else []
    for path in unix_sockets:
        _make_way(path)
    _use_one_malloc_arena()
    try:
        uvloop.run(_serve(settings))
    finally:
        for path in unix_sockets:
            Path(path).unlink(missing_ok=True)


async def _serve(settings: Settings) -> None:
    node = CacheNode(settings)
    app = client_app(node)
    clients = [_ClientServer(_client_config(app, host=settings.host, port=settings.port))]
    if settings.unix_socket:
        clients.append(_ClientServer(_client_config(app, uds=settings.unix_socket)))
    peers = PeerServer(
        peer_app(node),
        address=settings.host,
        port=settings.peer_port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http2,
        http2_settings=HTTP2Settings(
            initial_stream_window_size=STREAM_WINDOW_BYTES,
            initial_connection_window_size=CONNECTION_WINDOW_BYTES,
            max_frame_size=MAX_FRAME_BYTES,
            max_send_buffer_size=STREAM_WINDOW_BYTES,
        ),
        log_enabled=False,
    )
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    node.start()
    serving = [*(asyncio.create_task(server.serve()) for server in clients), asyncio.create_task(peers.serve())]
    stopping = asyncio.create_task(stop.wait())
    log.info(
        "pod %d of %d: clients on %s:%d%s, peers on %s:%d",
        settings.ordinal,
        settings.num_pods,
        settings.host,
        settings.port,
        f" and {settings.unix_socket}" if settings.unix_socket else "",
        settings.host,
        settings.peer_port,
    )
    await asyncio.wait([stopping, *serving], return_when=asyncio.FIRST_COMPLETED)
    for server in clients:
        server.should_exit = True
    peers.stop()  # type: ignore[no-untyped-call]
    await asyncio.wait(serving, timeout=10)
    await node.close()
    stopping.cancel()
    for task in serving:
        if task.done() and (error := task.exception()) is not None:
            raise error


def _client_config(app: FastAPI, **address: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        # Longer than a training step or an evaluation between two batches of a worker.
        timeout_keep_alive=300,
        timeout_graceful_shutdown=5,
        **address,
    )


class _ClientServer(uvicorn.Server):
    """uvicorn without its signal handlers: the pod has its own, which stop both servers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _use_one_malloc_arena() -> None:
    """Threads of the store and HTTP libraries allocate and free samples for each other; with an arena for each thread
    the freed memory of one is of no use to the next, and the process grows past its budget."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def _check_free(host: str, port: int) -> None:
    """Say in one line that a port is taken, before two servers fail in their own ways."""
    if port == 0:
        return
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InvalidInput(f"can't listen on {host}:{port}: {error.strerror}; choose another port") from error


def _make_way(path: str) -> None:
    """Remove the socket that a killed pod left behind; say in one line what else is in the way."""
    wrong = None
    if not os.access(os.path.dirname(path), os.W_OK | os.X_OK):
        wrong = "its folder is not there, or nothing can be written in it"
    elif os.path.lexists(path) and not Path(path).is_socket():
        wrong = "there is something else"
    else:
        kind = socket.SOCK_SEQPACKET if path.endswith(".memory") else socket.SOCK_STREAM
        with socket.socket(socket.AF_UNIX, kind) as probe:
            try:
                probe.connect(path)
                wrong = "another process serves it"
            except FileNotFoundError:
                pass  # nothing is in the way
            except ConnectionRefusedError:
                Path(path).unlink()
            except OSError as error:
                wrong = error.strerror
    if wrong is not None:
        raise InvalidInput(f"can't listen on unix_socket {path}: {wrong}; choose another path")
