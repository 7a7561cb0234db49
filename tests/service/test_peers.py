"""Connections to other pods: what waits for what."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from starlette.types import Receive, Scope, Send
from tests.conftest import free_port
from tests.waiting import until_in_loop

from refill.errors import InvalidInput, PodUnreachable, RequestTooLarge
from refill_service.demo.local_cluster import LocalCluster
from refill_service.memory.payload import AnswerSize
from refill_service.peers.certificates import Certificates
from refill_service.peers.peers import Peers
from refill_service.serving.peer_server import PeerServer
from refill_service.settings import load_settings

_ALIVE = "/peer/v1/alive"


class _HeldConnections:
    """Passes bytes on to a pod, until it holds back whatever comes over the connections that there are."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._passing: list[asyncio.Event] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pod_reader, pod_writer = await asyncio.open_connection("127.0.0.1", self._port)
        passes = asyncio.Event()
        passes.set()
        self._passing.append(passes)
        ways = (self._pass_on(reader, pod_writer, passes), self._pass_on(pod_reader, writer, passes))
        await asyncio.gather(*ways, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: asyncio.Event) -> None:
        while found := await reader.read(1 << 16):
            await passes.wait()
            writer.write(found)
        writer.close()

    def hold(self) -> None:
        for passes in self._passing:
            passes.clear()

    def release(self) -> None:
        for passes in self._passing:
            passes.set()


def test_a_sign_of_life_does_not_wait_for_samples_that_are_on_their_way(three_pods: LocalCluster) -> None:
    async def asked() -> None:
        held = _HeldConnections(three_pods.peer_ports[1])
        server = await asyncio.start_server(held.connected, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        peers = Peers((url,) * 3, 60)
        try:
            await peers.call(1, "GET", _ALIVE)
            held.hold()
            samples = asyncio.create_task(peers.call(1, "GET", _ALIVE))
            await peers.call(1, "GET", _ALIVE, apart=True)
            assert not samples.done()
            held.release()
            await samples
        finally:
            await peers.close()
            server.close()

    asyncio.run(asyncio.wait_for(asked(), 60))


_PIECE = bytes(1 << 20)


@asynccontextmanager
async def hostile_pod(
    status: int, pieces: list[bytes], *, may_end: asyncio.Event | None = None, says_length: bool = False, **options: int
) -> AsyncIterator[Peers]:
    """What a pod hears from one that answers so. Yields its connections."""

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        length = [(b"content-length", str(sum(map(len, pieces))).encode())] if says_length else []
        await send({"type": "http.response.start", "status": status, "headers": length})
        for piece in pieces[:-1]:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if may_end is not None:
            await may_end.wait()
        await send({"type": "http.response.body", "body": pieces[-1], "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    settings = load_settings(host="127.0.0.1", peer_port=free_port())
    server = PeerServer(answers, settings, None)
    serving = asyncio.create_task(server.serve())
    peers = Peers((f"http://127.0.0.1:{settings.peer_port}",) * 2, 60, **options)

    async def listens() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", settings.peer_port)
        except ConnectionError:
            return False
        writer.close()
        return True

    try:
        await until_in_loop(listens, "the pod")
        yield peers
    finally:
        await peers.close()
        server.stop()
        await serving


@pytest.mark.parametrize(
    ("status", "pieces", "error", "says"),
    [
        (200, [_PIECE] * 40, PodUnreachable, "answers with more than the 16,777,216 bytes that it may"),
        (503, [_PIECE] * 40, PodUnreachable, "answers with more than the 16,777,216 bytes that it may"),
        (200, [b"[" * 1_000_000], PodUnreachable, "answers with what is no JSON"),
        (404, [b"[" * 1_000_000], InvalidInput, "answered with status 404: "),
    ],
    ids=["endless", "an endless error", "deep JSON", "a deep error"],
)
def test_a_pod_that_answers_anything_at_all_is_an_error_of_ours(
    status: int, pieces: list[bytes], error: type[Exception], says: str
) -> None:
    async def asked() -> Exception:
        async with hostile_pod(status, pieces) as peers:
            with pytest.raises(error) as raised:
                await peers.call(1, "GET", _ALIVE)
            return raised.value

    raised = asyncio.run(asyncio.wait_for(asked(), 60))
    assert says in str(raised)
    assert len(str(raised)) < 1_000


@pytest.mark.parametrize("says_length", [True, False])
def test_what_pods_answer_in_json_is_counted_while_it_is_read(*, says_length: bool) -> None:
    """And one that would be too much waits until there is room: half of it is for other pods."""
    answer = [b"[1", b",1" * 50_000, b"]"]
    one = 20 * (sum(map(len, answer)) if says_length else 16 << 20)
    held: list[int] = []

    async def asked() -> None:
        may_end = asyncio.Event()
        options = {"most_answers_bytes": 5_000_000}
        async with hostile_pod(200, answer, may_end=may_end, says_length=says_length, **options) as peers:
            calls = [asyncio.create_task(peers.call(1, "GET", _ALIVE)) for _ in range(6)]

            async def see() -> None:
                while not may_end.is_set():
                    await asyncio.sleep(0)
                    if peers.answers.inside_bytes:
                        may_end.set()
                while not all(call.done() for call in calls):
                    held.append(peers.answers.inside_bytes)
                    await asyncio.sleep(0)

            await asyncio.gather(see(), *calls)
            assert all(call.result() == [1] * 50_001 for call in calls)
            assert peers.answers.inside_bytes == 0

    asyncio.run(asyncio.wait_for(asked(), 60))
    assert set(held) <= {0, one}
    assert one in held


@pytest.mark.parametrize(
    ("head", "error", "says"),
    [
        (struct.pack("<4sIQQ", b"RFF1", 0, 2**40, 0), PodUnreachable, "more than the 3 it may"),
        (struct.pack("<4sIQQ", b"RFF1", 0, 4, 0), PodUnreachable, "more than the 3 it may"),
        (struct.pack("<4sIQQ", b"RFF1", 0, 3, 2**50), RequestTooLarge, "ask for fewer at once"),
        (b"x" * 100, InvalidInput, "not a frame of this version"),
    ],
    ids=["more than there is", "one more", "endless", "no frame"],
)
def test_frames_of_another_pod_are_bounded_before_any_of_them_is_held(
    head: bytes, error: type[Exception], says: str
) -> None:
    async def asked() -> Exception:
        async with hostile_pod(200, [head, *[_PIECE] * 4]) as peers:
            with pytest.raises(error) as raised:
                async with peers.frames(1, _ALIVE, b"") as frames:
                    await frames.frame(3, AnswerSize(1 << 20).check)
            return raised.value

    raised = asyncio.run(asyncio.wait_for(asked(), 60))
    assert says in str(raised)


@contextlib.contextmanager
def full_backlog() -> Iterator[socket.socket]:
    """A socket that listens, where nobody else is connected."""
    with socket.socket() as listening, contextlib.ExitStack() as filling:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(3):  # more than its backlog
            waiting = filling.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield listening


def test_who_waits_for_a_connection_that_another_request_gives_up_has_its_answer(three_pods: LocalCluster) -> None:
    async def asked() -> Any:
        with full_backlog() as listening:
            port = listening.getsockname()[1]
            peers = Peers((f"http://127.0.0.1:{port}",) * 3, 60, connect_timeout_seconds=30)
            # Nothing is said of the pod by who asks no more.
            first, second = (asyncio.create_task(peers.call(1, "GET", _ALIVE)) for _ in range(2))
            before = _connecting_to(port)
            await until_in_loop(lambda: _connecting_to(port) > before, "a connection that is being made")
            first.cancel()
            server = await asyncio.start_server(_HeldConnections(three_pods.peer_ports[1]).connected, sock=listening)
            try:
                return await second
            finally:
                await peers.close()
                server.close()

    assert asyncio.run(asyncio.wait_for(asked(), 60)) == {"pod": 1}


def _connecting_to(port: int) -> int:
    with open("/proc/net/tcp") as known:
        return sum(f":{port:04X} 02 " in line for line in known)  # SYN_SENT


def test_who_waits_for_a_connection_that_can_not_be_made_is_told_so() -> None:
    async def asked() -> Exception:
        with full_backlog() as listening:
            peers = Peers((f"http://127.0.0.1:{listening.getsockname()[1]}",) * 3, 20, connect_timeout_seconds=0.5)
            found = await asyncio.gather(*(peers.call(1, "GET", _ALIVE) for _ in range(3)), return_exceptions=True)
            await peers.close()
        return next(each for each in found if isinstance(each, PodUnreachable) and "within" not in each.message)

    assert "another request, whose connection this one was to share, was given up" in str(asyncio.run(asked()))


@pytest.mark.parametrize("file", ["tls.crt", "tls.key", "ca.crt"])
def test_certificates_that_are_being_replaced_are_no_error_of_the_pod(tmp_path: Path, file: str) -> None:
    """Whoever asked the pod comes again. Empty for a moment, or of a pair of which the other file is still to come."""
    authority = trustme.CA()

    def write(name: str) -> None:
        made = authority.issue_cert(name)
        (tmp_path / "tls.crt").write_bytes(b"".join(each.bytes() for each in made.cert_chain_pems))
        (tmp_path / "tls.key").write_bytes(made.private_key_pem.bytes())
        (tmp_path / "ca.crt").write_bytes(authority.cert_pem.bytes())

    async def ask() -> str:
        url = f"https://127.0.0.1:{free_port()}"
        peers = Peers(
            (url,), 5, certificates=Certificates(*(tmp_path / name for name in ("tls.crt", "tls.key", "ca.crt")))
        )
        others = (tmp_path / file).read_bytes()
        write("another")
        said = set()
        for content in (b"", b"nonsense", *([] if file == "ca.crt" else [others])):
            (tmp_path / file).write_bytes(content)
            with pytest.raises(PodUnreachable) as caught:
                await peers.call(0, "GET", "/peer/v1/alive")
            said.add(" ".join(str(caught.value).split()[:7]))
        write("127.0.0.1")
        with pytest.raises(PodUnreachable, match="onnect"):
            await peers.call(0, "GET", "/peer/v1/alive")
        await peers.close()
        (found,) = said
        return found

    write("127.0.0.1")
    assert asyncio.run(ask()) == "certificates for other pods can't be used:"
