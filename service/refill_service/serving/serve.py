"""How does a pod run? Its servers share one event loop: uvicorn's for clients, granian's HTTP/2 for peers."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import logging
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import uvloop

from refill.errors import InvalidInput
from refill_service.memory.folder_lock import wait_until_left
from refill_service.memory.loop_turns import KEEPERS, LoopTurns
from refill_service.object_store.store_url import BUCKETS
from refill_service.observing.logs import begin_logging
from refill_service.observing.tracing import begin_tracing, end_tracing
from refill_service.pod.cache_node import CacheNode, PodPhase
from refill_service.serving.app import doors_of
from refill_service.serving.client_protocol import ClientLimits, ClientServer
from refill_service.serving.ending import Ending, ends_by_signal
from refill_service.serving.peer_server import PeerServer
from refill_service.serving.silent_peers import SilentPeers
from refill_service.serving.tokens import Tokens
from refill_service.settings import Settings

log = logging.getLogger(__name__)

_M_ARENA_MAX, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -8, -1, -3
_MOST_FREE_BYTES, _LARGEST_BYTES = 64 << 20, 32 << 20
"""At the end of the heap, and of a block in it. glibc comes to these by itself, by the largest block that was freed."""
_CLIENT_OPTIONS: dict[str, Any] = {
    "log_level": "error",
    "log_config": None,  # by the pod's own handler
    "proxy_headers": False,  # whoever connects could name another address by them, in the access log
    "access_log": False,
    "lifespan": "off",
    "ws": "none",
    # Longer than a training step or an evaluation between two batches of a worker.
    "timeout_keep_alive": 300,
}
_LOOK_AGAIN_SECONDS = 0.02
_STOP_SECONDS = 2


def serve(settings: Settings, metrics_socket: socket.socket | None = None) -> None:
    """Run a pod until SIGTERM or SIGINT.

    :param metrics_socket: listens at ``metrics_port`` already; closed with the pod. None: the pod listens there itself.
    """
    begin_logging(settings.log_level, settings.log_format, settings.ordinal)
    begin_tracing(settings.ordinal)
    for port in (settings.port, settings.peer_port, 0 if metrics_socket else settings.metrics_port):
        _check_free(settings.host, port)
    if settings.unix_socket:
        _make_way(settings.unix_socket)
    if settings.pinned_dir:
        wait_until_left(Path(settings.pinned_dir), "pinned_dir", settings.grace_seconds)
    _set_malloc()
    _take_all_file_descriptors()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        uvloop.run(_serve(settings, metrics_socket))
    finally:
        end_tracing()
        if settings.unix_socket:
            Path(settings.unix_socket).unlink(missing_ok=True)


async def _serve(settings: Settings, metrics_socket: socket.socket | None) -> None:
    client_tokens, peer_tokens = (
        Tokens(Path(path), settings.token_overlap_seconds) if path else None
        for path in (settings.client_tokens, settings.peer_token)
    )
    node = CacheNode(settings, teams=lambda: client_tokens.holders if client_tokens else ())
    turns, silent_peers = LoopTurns(), SilentPeers(settings.host, settings.peer_port, settings.num_pods)
    limits = ClientLimits(
        settings.client_timeout_seconds,
        settings.max_connections,
        settings.max_tls_connections,
        node.requests,
        node.quotas,
        node.bodies,
        turns,
    )
    doors = doors_of(node, turns, silent_peers, client_tokens, peer_tokens)
    options: dict[str, Any] = {"app": doors.clients, "at_once": doors.at_once, **_CLIENT_OPTIONS}
    over_tcp: dict[str, Any] = {"host": settings.host, "port": settings.port}
    clients = [ClientServer(limits, settings.client_certificates, **options, **over_tcp)]
    if settings.unix_socket:
        clients.append(ClientServer(limits, **options, uds=settings.unix_socket))
    peers = PeerServer(doors.pods, settings, settings.peer_certificates)
    others = [peers.serve()] if settings.serves_peers else []
    cutting = asyncio.create_task(silent_peers.cut()) if settings.serves_peers else None
    metrics = None
    if doors.metrics is not None:
        options = {"app": doors.metrics, "host": settings.host, "port": settings.metrics_port, **_CLIENT_OPTIONS}
        metrics = ClientServer(limits, comers=KEEPERS, **options)
        others.append(metrics.serve([metrics_socket] if metrics_socket else None))
    ends = ends_by_signal()
    node.start()
    looked_for_in_pieces()
    serving = [asyncio.create_task(each) for each in (*(server.serve() for server in clients), *others)]
    running = asyncio.create_task(_run_until(ends, node, clients))
    await asyncio.wait([running, *serving], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    running.cancel()
    if cutting is not None:
        cutting.cancel()
    if ends.is_set():
        await Ending(node, clients, serving, doors.clients, doors.pods).carry_out()
    for server in clients:
        server.end()
    peers.stop()
    await asyncio.wait(serving[:-1] if metrics else serving, timeout=_STOP_SECONDS)
    await node.close()
    if metrics is not None:  # last: a kubelet asks there until the process has ended, and warns if nobody answers
        metrics.end()
        await asyncio.wait(serving, timeout=_STOP_SECONDS)
    for task in serving:
        if task.done() and (error := task.exception()) is not None:
            raise error


async def _run_until(ends: asyncio.Event, node: CacheNode, clients: list[ClientServer]) -> None:
    settings = node.settings
    while not ends.is_set():
        if all(server.started for server in clients) and await _peers_answer(settings):
            break
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)  # neither server says when it listens
    if not ends.is_set():
        node.phase = PodPhase.READY
        log.info(
            "pod %d of %d: clients on %s:%d%s, %s",
            settings.ordinal,
            settings.num_pods,
            settings.host,
            settings.port,
            f" and {settings.unix_socket}" if settings.unix_socket else "",
            f"peers on {settings.host}:{settings.peer_port}" if settings.serves_peers else "no port for peers",
        )
        if found := _what_is_open(settings):
            log.warning("open: %s", "; ".join(found))
    await ends.wait()


async def _peers_answer(settings: Settings) -> bool:
    if not settings.serves_peers:
        return True
    try:
        _, writer = await asyncio.open_connection(settings.host, settings.peer_port)
    except OSError:
        return False
    writer.close()
    return True


def _what_is_open(settings: Settings) -> list[str]:
    """What the pod leaves open, said so that nobody takes a default for a wall: a sentence for each thing, with the
    setting that closes it."""
    found, port = [], f"{settings.host}:{settings.port}"
    if not settings.client_tokens:
        found.append(f"whoever reaches {port} may register, read and end every job (client_tokens)")
    if settings.serves_peers and not settings.peers_are_known:
        found.append(f"so may whoever reaches {settings.host}:{settings.peer_port} (peer_token, peer_tls_cert)")
    if not settings.dataset_urls or any(f"{scheme}://" in settings.dataset_urls for scheme in BUCKETS):
        found.append("jobs may name every bucket that this pod can read (dataset_urls)")
    if "hf://" in settings.dataset_urls:
        found.append("jobs may name every dataset of the Hub that this pod can read (dataset_urls)")
    if "file:///" in settings.dataset_urls:
        found.append("jobs may name every folder that this pod can read (dataset_urls)")
    if not settings.tls_cert:
        what = "tokens and samples" if settings.client_tokens else "samples"
        found.append(f"{what} come and go in clear at {port} (tls_cert)")
    if settings.num_pods > 1 and not settings.peer_tls_cert:
        found.append("samples go in clear between pods (peer_tls_cert)")
    if settings.metrics_port:
        found.append(
            f"whoever reaches {settings.host}:{settings.metrics_port} sees the names of all jobs (metrics_port)"
        )
    return found


def _set_malloc() -> None:
    """Threads of the store and HTTP libraries allocate and free samples for each other; with an arena for each thread
    the freed memory of one is of no use to the next, and the process grows past its budget.

    With its first thresholds, a pod with little memory would give pages back to the kernel and get them anew, cleared,
    for a good part of what it reads and sends.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_TRIM_THRESHOLD, _MOST_FREE_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)


def _take_all_file_descriptors() -> None:
    """As many as the system lets us have: often 1,024 until one asks, fewer than max_connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def cant_listen(host: str, port: int, error: OSError) -> str:
    """One line with what to do: only where another process has the port is it the port that is wrong."""
    found = f"can't listen on {host}:{port}: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        return f"{found}; choose another --port, --peer-port or --metrics-port"
    if error.errno == errno.EACCES:
        return f"{found}; ports below 1024 are for root: choose another one"
    return f"{found}; choose another --host: an address of this machine, 127.0.0.1 for it alone, or 0.0.0.0 for all"


def _check_free(host: str, port: int) -> None:
    """Say in one line that a port is taken, before two servers fail in their own ways."""
    if port == 0:
        return
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InvalidInput(cant_listen(host, port, error)) from error


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


_SWITCH_SECONDS = 0.0005
"""A thread waits for so long, each time, where the loop always has something to do. With Python's own 5 ms an epoch
whose order is made in a thread began 20 to 60 ms late."""

_NEW, _OLDEST = 0, 2
"""The first and the last of Python's three generations."""
_THRESHOLDS = (700, 5)
"""Of objects, and of looks among these: more often than Python's own, in smaller pieces."""
_NEVER, _NEXT = 1 << 30, 1
_OBJECTS_BETWEEN = 200_000
"""That were found to be in use, from one count of all to the next."""
_FEW_BLOCKS = 500_000
"""Of memory: so many more than twice as many as there were are no reason yet. Python counts these in a tenth of a
millisecond, and objects in use, one by one, in ten."""


def looked_for_in_pieces() -> None:
    """Garbage is, from now on, as long as the process lives. Everything that there is counts as in use.

    Python looks through everything that a process holds again and again: 10 ms in which a pod that has some jobs
    answers nobody, several times a second while clients come and go. Requests and connections leave no garbage that has
    to be looked for (``tests/security/test_no_garbage.py``). So what the second look has found to be in use is not
    looked through again, until there is twice as much in memory as there was. What becomes garbage later is found all
    the same: it takes no more than as much memory again.
    """
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS, _NEVER)
    gc.callbacks.append(_Looks().after)


class _Looks:
    def __init__(self) -> None:
        self._added = 0
        """Objects that were found to be in use since all were counted. Most of them have gone again."""
        self._there_were = sys.getallocatedblocks()
        """When everything was looked through."""
        self._is_at_all = False
        """The look that comes next."""

    def after(self, phase: str, info: dict[str, int]) -> None:
        """Python calls it before and after each look."""
        if phase != "stop" or info["generation"] == _NEW:
            return
        if not self._is_at_all:
            self._added += len(gc.get_objects(_OLDEST))
            gc.freeze()
            if self._added > _OBJECTS_BETWEEN:
                self._added = 0
                if sys.getallocatedblocks() > 2 * self._there_were + _FEW_BLOCKS:
                    gc.unfreeze()
                    gc.set_threshold(*_THRESHOLDS, _NEXT)
                    self._is_at_all = True
        elif info["generation"] == _OLDEST:
            gc.freeze()
            gc.set_threshold(*_THRESHOLDS, _NEVER)
            self._added, self._there_were, self._is_at_all = 0, sys.getallocatedblocks(), False
