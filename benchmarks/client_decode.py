"""How much CPU does the client spend on a sample? Parsing its tar range, and the whole of ``__getitems__``.

    python benchmarks/client_decode.py

Prints microseconds of CPU for each sample, for samples of 3 KB and of 100 KB with a class beside them, each the best
of several rounds: tarfile and ``refill.formats.tar_samples`` on the same ranges, then batches of 256 from a server
process on loopback that answers at once with a frame made before (only the client's CPU is counted; what is left of it
is mostly the kernel's copy of the payload). Then bytes from a loader worker, CPU of both. About a minute.
"""

from __future__ import annotations

import io
import multiprocessing
import random
import resource
import socket
import tarfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from machine import machine
from PIL import Image
from torch.utils.data import DataLoader

from refill import CacheDataset, Position
from refill.formats.tar_samples import parse_members
from refill.protocol.wire_format import encode_frame_head

BATCH = 256
NAME = "train/n01440764/n01440764_10026"
SECONDS = 1.0
WORKER_BATCHES = 40
INFO = b'{"incarnation": "1", "num_samples": 256, "samples_per_rank": 256, "metadata": {}, "pods": [], "ordinal": 0}'


def main() -> None:
    print(f"{machine()}, numpy {np.__version__}")
    print(f"{'CPU microseconds per sample':44}{'3 KB':>10}{'100 KB':>10}")
    sizes = (3_000, 100_000)
    for label, name in (("short names", NAME), ("long names", "d" * 150 + "/n01440764_10026")):
        ranges = [_tar_range(name, random.Random(1).randbytes(size)) for size in sizes]
        _row(f"tarfile, {label}", [_microseconds(partial(_by_tarfile, raw), 1) for raw in ranges])
        views = [memoryview(raw) for raw in ranges]
        _row(f"tar_samples, {label}", [_microseconds(partial(parse_members, view, 0), 1) for view in views])
    contents = [_jpeg(3_000), _jpeg(100_000)]
    for decode in (None, True, "views"):
        _row(f"__getitems__, decode={decode}", [_of_a_batch(content, decode, _asked_alone) for content in contents])
    _row("from a worker, decode=None", [_of_a_batch(content, None, _by_a_worker) for content in contents])


def _asked_alone(dataset: CacheDataset) -> float:
    positions = [Position(0, position) for position in range(BATCH)]
    return _microseconds(lambda: dataset.__getitems__(positions), BATCH)


def _by_a_worker(dataset: CacheDataset) -> float:
    """Of loop and loader worker together, in one epoch of so many batches; the worker's start is taken off."""

    def epoch(batches: int) -> float:
        sampler = [[Position(0, position) for position in range(BATCH)]] * batches
        before = _cpu_with_children()
        for _ in DataLoader(dataset, batch_sampler=sampler, num_workers=1, collate_fn=list):
            pass
        return _cpu_with_children() - before

    epoch(1)
    return 1e6 * min(epoch(1 + WORKER_BATCHES) - epoch(1) for _ in range(3)) / (WORKER_BATCHES * BATCH)


def _cpu_with_children() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _of_a_batch(content: bytes, decode: bool | str | None, measured: Callable[[CacheDataset], float]) -> float:
    """Microseconds of one sample of a batch; all samples of the batch are the same."""
    frame = _frame(_tar_range(NAME, content))
    listening = socket.create_server(("127.0.0.1", 0))
    server = multiprocessing.get_context("fork").Process(target=_serve, args=(listening, frame), daemon=True)
    server.start()
    try:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        dataset = CacheDataset(
            url, dataset="file:///data", job="benchmark", policy="redox", rank=0, world_size=1, decode=decode
        )
        return measured(dataset)
    finally:
        server.kill()
        server.join()
        listening.close()


def _microseconds(call: Callable[[], Any], samples: int) -> float:
    """CPU of this process for each sample, the best of rounds of about a fifth of a second."""
    call()
    best, until = float("inf"), time.monotonic() + SECONDS
    while time.monotonic() < until:
        calls, started, stop = 0, time.process_time(), time.monotonic() + SECONDS / 5
        while time.monotonic() < stop or not calls:
            call()
            calls += 1
        best = min(best, (time.process_time() - started) / calls)
    return 1e6 * best / samples


def _by_tarfile(raw: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def _tar_range(name: str, content: bytes) -> bytes:
    pieces = []
    for extension, data in (("jpg", content), ("cls", b"7")):
        info = tarfile.TarInfo(f"{name}.{extension}")
        info.size = len(data)
        pieces += [info.tobuf(tarfile.PAX_FORMAT), data, bytes(-len(data) % 512)]
    return b"".join(pieces)


def _jpeg(size: int) -> bytes:
    """An image of noise whose JPEG has about this many bytes."""
    side = int((size / 1.6) ** 0.5)
    pixels = np.random.default_rng(1).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "jpeg")
    return buffer.getvalue()


def _frame(raw: bytes) -> bytes:
    positions = np.arange(BATCH, dtype=np.int64)
    return encode_frame_head(positions, positions, np.full(BATCH, len(raw))) + raw * BATCH


def _serve(listening: socket.socket, frame: bytes) -> None:
    """The least that a pod must answer: this frame to every batch, and what it says of the job to all else."""
    while True:
        peer, _ = listening.accept()
        threading.Thread(target=_answer, args=(peer, frame), daemon=True).start()


def _answer(peer: socket.socket, frame: bytes) -> None:
    while True:
        head = b""
        while b"\r\n\r\n" not in head:
            if not (piece := peer.recv(65536)):
                return
            head += piece
        fields, _, rest = head.partition(b"\r\n\r\n")
        lines = fields.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        while len(rest) < length:
            rest += peer.recv(65536)
        body = frame if b"/batch" in lines[0] else INFO
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
        peer.sendall(body)


def _row(label: str, values: list[float]) -> None:
    print(f"{label:44}" + "".join(f"{value:10.1f}" for value in values), flush=True)


if __name__ == "__main__":
    main()
