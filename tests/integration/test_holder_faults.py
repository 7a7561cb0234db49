"""What does the connection holder do about pods, askers and machines that are not as they should be?"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.held_connections import connections_to, holder_folder, holders
from tests.waiting import until

from refill.errors import JobConflict, PodUnreachable, RefillError
from refill.pods import holder_door
from refill.pods.credentials import TOKEN_VARIABLE, Credentials
from refill.pods.holder_door import QUICK_LANE, HolderLink, door
from refill.pods.pod_channel import PodChannel, Wait

__all__ = ["holder_folder"]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class FakePod:
    """Answers each request by ``answer``, which is given the number of its connection, and the request's head."""

    def __init__(self, answer: Callable[[socket.socket, int, bytes], None]) -> None:
        self._answer = answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        number = 0
        while True:
            try:
                sock = self._listening.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock, number), daemon=True).start()
            number += 1

    def _serve(self, sock: socket.socket, number: int) -> None:
        with sock:
            try:
                while head := sock.recv(10_000):
                    self._answer(sock, number, head)
            except OSError:
                pass

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def pods() -> Iterator[Callable[[Callable[[socket.socket, int, bytes], None]], FakePod]]:
    found: list[FakePod] = []

    def begin(answer: Callable[[socket.socket, int, bytes], None]) -> FakePod:
        found.append(FakePod(answer))
        return found[-1]

    yield begin
    for pod in found:
        pod.close()


Pods = Callable[[Callable[[socket.socket, int, bytes], None]], FakePod]


def says_ok(sock: socket.socket, number: int, head: bytes) -> None:
    sock.sendall(OK)


def held(**more: Any) -> PodChannel:
    return PodChannel(Credentials(), 2, held_for="a", **more)


def call(pod: FakePod, path: str = "/x", seconds: float = 60.0, **more: Any) -> dict[str, Any]:
    return held(**more).call("GET", pod.url, path, Wait(seconds))


@pytest.mark.variants("before-the-head")
@pytest.mark.parametrize("begun", [b"", OK[:-1]], ids=["before-the-head", "within-the-body"])
def test_a_holder_that_stands_still_is_left_after_seconds(pods: Pods, holder_folder: Path, begun: bytes) -> None:
    """Also in the middle of an answer, where nobody asks the pod for a sign of life."""
    has_begun = threading.Event()

    def answer(sock: socket.socket, number: int, head: bytes) -> None:
        sock.sendall(OK if number else begun)
        has_begun.set()

    pod, came = pods(answer), []
    thread = threading.Thread(target=lambda: came.append(call(pod)))
    thread.start()
    has_begun.wait(60)
    time.sleep(0.2)
    (holder,) = holders(holder_folder)
    os.kill(holder, signal.SIGSTOP)
    started = time.monotonic()
    thread.join(60)
    assert came == [{}]
    assert time.monotonic() - started < 50, "the request had 60 s"
    assert not door.is_open
    door.alone_until = 0.0  # half a minute later it stands still
    started = time.monotonic()
    assert call(pod) == {}
    assert time.monotonic() - started < 10
    assert not door.is_open
    os.kill(holder, signal.SIGCONT)
    door.alone_until = 0.0
    assert call(pod) == {}
    assert door.is_open


def test_a_holder_that_is_killed_in_the_middle_of_an_answer_is_replaced(pods: Pods, holder_folder: Path) -> None:
    has_begun = threading.Event()

    def answer(sock: socket.socket, number: int, head: bytes) -> None:
        sock.sendall(OK if number else OK[:-1])
        has_begun.set()

    pod, came = pods(answer), []
    thread = threading.Thread(target=lambda: came.append(call(pod)))
    thread.start()
    has_begun.wait(60)
    time.sleep(0.2)
    (holder,) = holders(holder_folder)
    os.kill(holder, signal.SIGKILL)
    thread.join(60)
    assert came == [{}]
    assert door.is_open
    assert holders(holder_folder) != [holder], "its socket was still there"


def test_one_whose_socket_was_deleted_makes_room_for_another(pods: Pods, holder_folder: Path) -> None:
    """As those do that tidy up folders for temporary files."""
    pod = pods(says_ok)
    channel = held()
    assert channel.call("GET", pod.url, "/x", Wait(60)) == {}
    (holder,) = holders(holder_folder)
    (path,) = holder_folder.glob("*.sock")
    path.unlink()
    assert call(pod) == {}
    assert door.is_open
    assert holders(holder_folder) != [holder]
    assert channel.call("GET", pod.url, "/x", Wait(60)) == {}


def test_a_folder_whose_path_is_too_long_is_not_used(
    pods: Pods, holder_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A Unix socket's path has 107 bytes at most."""
    folder = holder_folder.parent / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    door.has_warned = False
    with caplog.at_level(logging.WARNING):
        assert [call(pods(says_ok)) for _ in range(3)] == [{}] * 3
    assert len([each for each in caplog.records if "no connection holder" in each.message]) == 1
    assert not door.is_open


def test_a_folder_that_can_not_be_made_is_not_used(
    pods: Pods, holder_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_folder = holder_folder.parent / "file"
    no_folder.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(no_folder))
    assert call(pods(says_ok)) == {}
    assert not door.is_open


def test_a_silent_pod_is_not_taken_for_a_silent_holder(
    pods: Pods, holder_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all who wait for its sign of life hear that none came, whoever asked first."""
    monkeypatch.setattr(holder_door, "_ANSWERS_SECONDS", 60.0)  # it may get no core for a while
    call(pods(says_ok))  # the holder is there
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        errors: list[RefillError] = []

        def ask() -> None:
            try:
                held(is_quick=True).call("GET", url, "/healthz", Wait(1.5))
            except RefillError as error:
                errors.append(error)

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert [type(error) for error in errors] == [PodUnreachable] * 12
    assert door.is_open
    assert connections_to([int(url.rpartition(":")[2])]) == 0


def test_one_that_may_open_no_more_files_goes_on(pods: Pods, holder_folder: Path) -> None:
    """Who finds no room there has connections of their own."""
    pod = pods(says_ok)
    channel = held()
    assert channel.call("GET", pod.url, "/x", Wait(60)) == {}
    (holder,) = holders(holder_folder)
    is_open = {int(each.name) for each in Path(f"/proc/{holder}/fd").iterdir()}
    most = min(set(range(len(is_open) + 1)) - is_open)
    resource.prlimit(holder, resource.RLIMIT_NOFILE, (most, most))
    assert call(pod) == {}
    assert not door.is_open
    door.alone_until = 0.0
    assert channel.call("GET", pod.url, "/x", Wait(60)) == {}
    assert holders(holder_folder) == [holder]


def test_answers_are_passed_on_as_they_come_and_not_collected(pods: Pods, holder_folder: Path) -> None:
    piece, count = bytes(1 << 20), 192

    def answer(sock: socket.socket, number: int, head: bytes) -> None:
        sock.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(piece) * count}\r\n\r\n".encode())
        for _ in range(count):
            sock.sendall(piece)

    pod = pods(answer)
    sock = door.connect()
    assert sock is not None
    link = HolderLink(pod.url, Credentials(), 2, sock, "a")
    link.send_request("GET", "/x", b"", {}, 60)
    response = link.getresponse()
    link.takes(len(piece) * count)
    (holder,) = holders(holder_folder)
    time.sleep(1)  # nobody reads
    for _ in range(count):
        assert len(response.read(len(piece))) == len(piece)
    assert _most_memory(holder) < 100 << 20
    link.close()


def _most_memory(process: int) -> int:
    (line,) = [each for each in Path(f"/proc/{process}/status").read_text().splitlines() if each.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def test_a_token_goes_over_no_connection_of_another(
    pods: Pods, holder_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: dict[int, set[str]] = {}

    def answer(sock: socket.socket, number: int, head: bytes) -> None:
        tokens = {line.split()[-1] for line in head.decode().split("\r\n") if line.lower().startswith("authorization:")}
        shown.setdefault(number, set()).update(tokens or {""})
        assert b"Refill-Held" not in head
        sock.sendall(OK)

    pod = pods(answer)
    monkeypatch.setenv("REFILL_TOKEN_HOSTS", "127.0.0.1")
    for turn in range(6):
        for token in ("", "one-token-of-a-team-1", "one-token-of-a-team-2"):
            if token:
                monkeypatch.setenv(TOKEN_VARIABLE, token)
            else:
                monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
            for path in ("/x", "/healthz"):
                assert call(pod, path, is_quick=bool(turn % 2)) == {}
    assert all(len(tokens) == 1 for tokens in shown.values())
    assert {token for tokens in shown.values() for token in tokens} == {
        "",
        "one-token-of-a-team-1",
        "one-token-of-a-team-2",
    }
    (log_file,) = holder_folder.glob("*.log")
    assert "one-token" not in log_file.read_text()


@pytest.mark.parametrize("held_for", ["a", None])
def test_errors_of_pods_are_the_same_by_way_of_it(pods: Pods, holder_folder: Path, held_for: str | None) -> None:
    body = json.dumps(JobConflict("it is another one", which=7).to_wire()).encode()

    def answer(sock: socket.socket, number: int, head: bytes) -> None:
        if b"/gone" in head:
            sock.shutdown(socket.SHUT_RDWR)
        else:
            sock.sendall(b"HTTP/1.1 409 Conflict\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    pod = pods(answer)
    channel = PodChannel(Credentials(), 2, held_for=held_for)
    with pytest.raises(JobConflict, match="it is another one") as found:
        channel.call("GET", pod.url, "/x", Wait(60))
    assert found.value.details == {"which": 7}
    with pytest.raises(PodUnreachable, match="does not answer: Remote end closed connection without response"):
        channel.call("GET", pod.url, "/gone", Wait(60))
    with pytest.raises(PodUnreachable, match="it was reached, and timed out") as late:
        channel.call("GET", pods(lambda *_: None).url, "/x", Wait(1))
    assert late.value.details["silent"] is True
    with pytest.raises(PodUnreachable, match=r"can't connect to 127\.0\.0\.1:1: Connection refused"):
        channel.call("GET", "http://127.0.0.1:1", "/x", Wait(60))
    assert bool(holders(holder_folder)) == (held_for is not None)


def test_what_an_asker_does_not_wait_for_is_not_asked_of_a_pod(pods: Pods, holder_folder: Path) -> None:
    """Its process has ended while all connections were taken."""
    asked: list[bytes] = []
    may_answer = threading.Event()

    def answer(sock: socket.socket, number: int, head: bytes) -> None:
        asked.append(head)
        may_answer.wait()
        sock.sendall(OK)

    pod = pods(answer)
    threads = [threading.Thread(target=call, args=(pod,), kwargs={"is_quick": True}) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: len(asked) == 2, "requests over all connections")
    sock = door.connect()
    assert sock is not None
    with sock:
        link = HolderLink(pod.url, Credentials(), 2, sock, "a")
        link.lane = QUICK_LANE
        link.send_request("GET", "/y", b"", {}, 60)
    may_answer.set()
    for thread in threads:
        thread.join(60)
    assert call(pod, "/z", is_quick=True) == {}
    assert [head.split()[1] for head in asked] == [b"/x", b"/x", b"/z"]
