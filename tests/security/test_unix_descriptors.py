"""Who reaches the folder of a pod's Unix socket can send it file descriptors, and one may take long to close."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from refill_service.demo.local_cluster import LocalCluster

LINGER_SECONDS = 600
PATIENCE_SECONDS = 20


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as short:
        yield Path(short) / "refill.sock"


def test_a_descriptor_that_takes_long_to_close_holds_up_nobody_or_the_pod_warned(tmp_path: Path, path: Path) -> None:
    """A TCP connection whose other side reads nothing, told to linger: closing it stops the thread that does."""
    with LocalCluster(1, tmp_path, {"memory_bytes": "4MiB", "unix_socket": str(path)}) as cluster:
        if "this kernel is older than Linux 6.16" in cluster.log(0):
            pytest.skip("this kernel hands descriptors over to whoever reads, and the pod has said so")
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as door, lingering() as descriptor:
            door.connect(str(path))
            send(door, b"GET /healthz HTTP/1.1\r\n\r\n", descriptor)
            assert httpx.get(f"{cluster.pod_urls[0]}/healthz", timeout=PATIENCE_SECONDS).status_code == 200
            door.close()
            assert httpx.get(f"{cluster.pod_urls[0]}/healthz", timeout=PATIENCE_SECONDS).status_code == 200


def send(door: socket.socket, said: bytes, descriptor: int) -> None:
    """And let go of the descriptor, in a thread: if the pod was quicker, it is this that takes long."""
    try:
        socket.send_fds(door, [said], [descriptor])
    except PermissionError:  # the pod does not even get it
        door.send(said)
    threading.Thread(target=os.close, args=(descriptor,), daemon=True).start()


@contextlib.contextmanager
def lingering() -> Iterator[int]:
    """The descriptor of a connection that can't get rid of its bytes, for a receiver to close."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        sender = socket.create_connection(listener.getsockname())
        reader, _ = listener.accept()
        stack.enter_context(reader)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_SECONDS))
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.send(bytes(1 << 16))
        sender.setblocking(True)
        try:
            yield sender.detach()
        finally:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            reader.close()  # by a reset: nothing is left to linger for
