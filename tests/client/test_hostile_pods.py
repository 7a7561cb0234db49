"""What becomes of a training process when a pod answers anything? An error of ours, in bounded time and memory."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from refill.errors import PodUnreachable, RefillError
from refill.pods import pod_answer
from refill.pods.credentials import Credentials
from refill.pods.pod_channel import PodChannel, Wait
from refill.pods.pod_connection import PodConnection
from refill.pods.received_batch import Expected
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import encode_frame_head

Says = Callable[[socket.socket], None]
SPEC = JobSpec(name="a", dataset="file:///x")
INFO: dict[str, Any] = {"incarnation": "1", "pods": [], "num_samples": 4, "samples_per_rank": 4, "metadata": {}}
MOST_MORE_BYTES = 32 << 20


@contextmanager
def pod(says: Says) -> Iterator[str]:
    """Reads a request of each connection, and says what it likes until the other side has gone. Gives its URL."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(1 << 16)
                says(connection)
            except OSError:
                return

    def listen() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def head(length: int | str, status: int = 200, *more: str) -> bytes:
    lines = [f"HTTP/1.1 {status} OK", f"Content-Length: {length}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def whole(body: bytes, status: int = 200) -> Says:
    return lambda connection: connection.sendall(head(len(body), status) + body)


def in_json(answer: Any, status: int = 200) -> Says:
    return whole(json.dumps(answer).encode(), status)


def for_ever(piece: bytes, first: bytes = b"", seconds: float = 0) -> Says:
    def says(connection: socket.socket) -> None:
        connection.sendall(first)
        while True:
            connection.sendall(piece)
            time.sleep(seconds)

    return says


def asked(url: str, wait_seconds: float = 20) -> RefillError:
    """The error that a small request to it ends in."""
    with pytest.raises(RefillError) as raised:
        PodChannel(Credentials(), 2).call("GET", url, "/v1/pods", Wait(wait_seconds))
    assert "\n" not in raised.value.message
    assert len(raised.value.message) < 1000
    return raised.value


def fetched(url: str, wait_seconds: float = 20) -> RefillError:
    """The error that a request for samples 3 and 5 ends in."""
    expected = Expected(sample_ids=np.array([3, 5]))
    with pytest.raises(RefillError) as raised:
        PodChannel(Credentials(), 2).fetch(url, "/v1/jobs/a/samples", b"", expected, Wait(wait_seconds))
    return raised.value


def more_bytes(since: int) -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - since


@pytest.mark.parametrize("ask", [asked, fetched])
@pytest.mark.parametrize("status", [200, 400, 503])
@pytest.mark.parametrize("length", [2**40, 2**62, "9" * 400])
def test_a_length_that_nobody_has_memory_for(ask: Any, status: int, length: int | str) -> None:
    """It was a MemoryError, or as much memory as there is."""
    with pod(for_ever(bytes(1 << 16), head(length, status))) as url:
        before = more_bytes(0)
        ask(url)
    assert more_bytes(before) < MOST_MORE_BYTES


def test_a_frame_that_says_the_same_length_but_has_no_memory_here() -> None:
    """What it says agrees with itself and with what was asked for."""
    frame = encode_frame_head(np.array([0, 1]), np.array([3, 5]), np.array([2**46, 2**46]))
    with pod(for_ever(bytes(1 << 16), head(len(frame) + 2**47) + frame)) as url:
        assert "and this process has no memory for them" in fetched(url).message


@pytest.mark.parametrize("ask", [asked, fetched])
def test_an_error_of_any_length(ask: Any) -> None:
    """500 MB of it took 1.3 GB of memory."""
    text = b'{"error": "InvalidInput", "message": "' + b"x" * (1 << 20)
    before = more_bytes(0)
    with pod(for_ever(bytes(1 << 20).replace(b"\0", b"x"), head(500 << 20, 400) + text)) as url:
        ask(url)
    with pod(
        for_ever(b"10000\r\n" + b"x" * (1 << 16) + b"\r\n", b"HTTP/1.1 400 x\r\nTransfer-Encoding: chunked\r\n\r\n")
    ) as url:
        ask(url)
    assert more_bytes(before) < MOST_MORE_BYTES


def test_an_error_in_place_of_a_sample_is_no_longer_than_errors_are() -> None:
    frame = encode_frame_head(np.array([0, 1]), np.array([3, 5]), np.array([-(4 << 20), 0])) + bytes(4 << 20)
    with pod(whole(frame)) as url:
        assert "an error of 4,194,304 bytes in place of a sample" in fetched(url).message


@pytest.mark.parametrize("status", [200, 400, 503])
@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"\xff\xfe", b"null", b'"x"', b'{"pods": ' + b"[" * 10**6]
)
def test_json_that_is_nested_deeply_or_is_none(body: bytes, status: int) -> None:
    """It was a RecursionError."""
    with pod(whole(body, status)) as url:
        asked(url)
        fetched(url)


ENDLESS = {
    "it will come": for_ever(b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "it will come, some day": for_ever(b"HTTP/1.1 100 Continue\r\n\r\n", seconds=0.05),
    "headers": for_ever(b"HTTP/1.1 100 Continue\r\n" + b"a: b\r\n" * 50 + b"\r\n"),
    "a byte now and then": for_ever(b"x", head(1000), seconds=0.05),
    "a byte of the head now and then": for_ever(b"x", b"HTTP/1.1 200 ", seconds=0.05),
    "trailers": for_ever(
        b"a: b\r\n" * 100, b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", seconds=0.005
    ),
    "chunks": for_ever(b"1\r\nx\r\n", b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n", seconds=0.05),
}


@pytest.mark.parametrize("says", ENDLESS.values(), ids=ENDLESS)
def test_an_answer_that_never_ends_is_not_waited_for(says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte of it was in time. All of it is, or it is given up, as from a pod that does not answer."""
    monkeypatch.setattr(pod_answer, "LEAST_BYTES_PER_SECOND", 64 << 20)
    with pod(says) as url:
        assert isinstance(asked(url, wait_seconds=0.5), PodUnreachable)
        assert isinstance(fetched(url, wait_seconds=0.5), RefillError)


def test_a_long_answer_has_more_time_than_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples over a slow link: what comes of them gives the rest its time."""
    monkeypatch.setattr(pod_answer, "LEAST_BYTES_PER_SECOND", 1 << 10)
    frame = encode_frame_head(np.array([0, 1]), np.array([3, 5]), np.array([4000, 4000])) + bytes(8000)

    def says(connection: socket.socket) -> None:
        connection.sendall(head(len(frame)))
        for start in range(0, len(frame), 1000):
            connection.sendall(frame[start : start + 1000])
            time.sleep(0.1)

    with pod(says) as url:
        expected = Expected(sample_ids=np.array([3, 5]))
        found = PodChannel(Credentials(), 2).fetch(url, "/samples", b"", expected, Wait(0.5))
    assert found.num_bytes == 8000


@pytest.mark.parametrize(
    "wrong",
    [
        {"pods": None},
        {"pods": "http://x"},
        {"pods": [1]},
        {"pods": ["nowhere"]},
        {"pods": ["http://[x"]},
        {"pods": {"0": "http://x"}},
        {"incarnation": None},
        {"num_samples": "many"},
        {"num_samples": -1},
        {"num_samples": 10**30},
        {"samples_per_rank": 1.5},
        {"metadata": []},
        {"incarnation": "x"},
        {"chunks_in_memory": 1, "good_chunks_in_memory": "x"},
    ],
)
def test_a_job_that_is_said_to_be_otherwise(wrong: dict[str, Any]) -> None:
    """It was a KeyError, or whatever Python says."""
    with pod(in_json(INFO | wrong)) as url, pytest.raises(RefillError):
        PodConnection(url, SPEC, 0, None, timeout_seconds=0).info()


def test_a_job_that_lacks_what_all_have() -> None:
    for name in ("pods", "incarnation"):
        rest = {key: value for key, value in INFO.items() if key != name}
        with pod(in_json(rest)) as url, pytest.raises(RefillError, match=r"what no pod sends|not as a pod does"):
            PodConnection(url, SPEC, 0, None, timeout_seconds=0).info()
