"""The memory socket: who may use it, for what, and that nothing on it holds up the pod."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.pod_fixtures import kind_of
from tests.waiting import until

from refill.credentials import Credentials
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import FRAME_BYTES_HEADER, MEMORY_HEADER
from refill_service.demo.local_cluster import LocalCluster

Packed = tuple[str, dict[str, bytes]]
TOKENS = {"vision": "vision-0123456789abcdef", "speech": "speech-0123456789abcdef"}
LINGER_SECONDS = 600
PATIENCE_SECONDS = 20
MEMORY_BYTES = 2 << 20


@dataclass
class Neighbour:
    """Who shares the pod's machine, and the folder of its sockets."""

    cluster: LocalCluster
    path: Path
    token_of_vision: Path

    def ask(self, method: str, path: str, team: str | None = None, **more: object) -> httpx.Response:
        headers = {} if team is None else {"authorization": f"Bearer {TOKENS[team]}"}
        headers |= more.pop("headers", {})  # type: ignore[call-overload]
        url = self.cluster.pod_urls[0] + path
        return httpx.request(method, url, headers=headers, timeout=PATIENCE_SECONDS, **more)  # type: ignore[arg-type]

    def name(self, team: str) -> str:
        return str(self.ask("POST", "/v1/memory", team).json()["name"])

    @contextlib.contextmanager
    def at_the_door(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.settimeout(PATIENCE_SECONDS)
            door.connect(f"{self.path}.memory")
            yield door

    def lent(self) -> int:
        """Segments of clients that the pod has mapped."""
        return Path(f"/proc/{self.cluster.processes[0].pid}/maps").read_text().count("memfd:")


@pytest.fixture(scope="module")
def neighbour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Neighbour]:
    folder = tmp_path_factory.mktemp("machine")
    (folder / "tokens").mkdir()
    for team, token in TOKENS.items():
        (folder / "tokens" / team).write_text(token)
        (folder / f"token-of-{team}").write_text(token)
    with tempfile.TemporaryDirectory() as short:
        path = Path(short) / "refill.sock"
        settings: dict[str, str | int | float] = {"memory_bytes": "256MiB", "unix_socket": str(path)}
        with LocalCluster(1, folder, settings | {"client_tokens": str(folder / "tokens")}) as cluster:
            yield Neighbour(cluster, path, folder / "token-of-vision")


def test_who_has_no_token_gets_no_name_and_without_a_name_nothing_is_taken(neighbour: Neighbour) -> None:
    assert neighbour.ask("POST", "/v1/memory").status_code == 401
    for said in (b"m", b"0" * 32, "ä".encode()):
        with neighbour.at_the_door() as door:
            send(door, said, memory())
            assert door.recv(64) in (b"-", b"")
    assert neighbour.lent() == 0


def test_a_name_opens_once(neighbour: Neighbour) -> None:
    name = neighbour.name("vision")
    with neighbour.at_the_door() as door:
        assert hand_over(door, name, memory()) == b"+"
        assert neighbour.lent() == 1
        with neighbour.at_the_door() as again:
            again.send(name.encode())
            assert again.recv(64) == b"-"
    until_nothing_is_lent(neighbour)


def test_names_that_nobody_comes_by_are_limited_for_each_team(neighbour: Neighbour) -> None:
    with httpx.Client(base_url=neighbour.cluster.pod_urls[0]) as client:
        shown = {"authorization": f"Bearer {TOKENS['speech']}"}
        answers = [client.post("/v1/memory", headers=shown).status_code for _ in range(65)]
    assert answers == [200] * 64 + [503]
    assert neighbour.ask("POST", "/v1/memory", "vision").status_code == 200


@pytest.fixture(params=["redox", "planned"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_what_one_team_lends_holds_no_answer_to_another(neighbour: Neighbour, packed: Packed, policy: str) -> None:
    """Whoever guessed the name of another's memory could have answers written there."""
    job = {"dataset": packed[0], "memory_bytes": 600_000, "chunk_size": 16, "policy": policy}
    paths = {team: f"/v1/jobs/lent-{policy}-{team}" for team in TOKENS}
    plans = {}
    for team, path in paths.items():
        registered = neighbour.ask("PUT", path, team, json=job)
        assert registered.status_code == 200
        plans[team] = {"plan": registered.json().get("plan_id", "")}

    def samples(team: str) -> httpx.Response:
        of = "/planned/samples" if policy == "planned" else "/samples"
        body, header = np.array([1, 2], dtype="<i8").tobytes(), {MEMORY_HEADER: name}
        return neighbour.ask("POST", paths[team] + of, team, content=body, headers=header, params=plans[team])

    name = neighbour.name("vision")
    with neighbour.at_the_door() as door:
        assert hand_over(door, name, memory()) == b"+"
        assert int(samples("vision").headers[FRAME_BYTES_HEADER]) > 0
        crossed = samples("speech")
        assert (crossed.status_code, FRAME_BYTES_HEADER in crossed.headers) == (200, False)
        assert len(crossed.content) > 0
    until_nothing_is_lent(neighbour)
    for team, path in paths.items():
        assert neighbour.ask("DELETE", path, team).status_code == 200


@pytest.mark.parametrize(
    "what", ["socket", "pipe", "device", "file", "not sealed", "no pages", "empty", "too much", "huge pages", "several"]
)
def test_what_is_no_memory_or_could_harm_the_pod_is_refused(neighbour: Neighbour, what: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        match what:
            case "socket":
                fds = [stack.enter_context(socket.socket()).detach()]
            case "pipe":
                fds = [*os.pipe()][:1]
            case "device":
                fds = [os.open("/dev/zero", os.O_RDWR)]
            case "file":
                (tmp_path / "file").write_bytes(bytes(MEMORY_BYTES))
                fds = [os.open(tmp_path / "file", os.O_RDWR)]
            case "not sealed":
                fds = [memory(sealed=False)]
            case "no pages":
                fds = [memory(allocated=False)]
            case "empty":
                fds = [memory(0)]
            case "too much":
                fds = [memory(64 << 20)]
            case "huge pages":
                try:
                    fds = [memory(flags=os.MFD_HUGETLB, allocated=False)]
                except OSError:
                    pytest.skip("there are none on this machine")
            case "several":
                fds = [memory(), memory()]
        with neighbour.at_the_door() as door:
            assert hand_over(door, neighbour.name("vision"), *fds) == b"-"
    assert neighbour.lent() == 0


@pytest.mark.parametrize("at", ["memory socket", "memory socket, with a name", "http socket"])
def test_a_descriptor_that_takes_long_to_close_holds_up_nobody(neighbour: Neighbour, at: str) -> None:
    """A TCP connection whose other side reads nothing, told to linger: closing it stops the thread that does."""
    with contextlib.ExitStack() as stack:
        if at == "http socket":
            door = stack.enter_context(socket.socket(socket.AF_UNIX))
            door.connect(str(neighbour.path))
        else:
            door = stack.enter_context(neighbour.at_the_door())
        said = b"GET /healthz HTTP/1.1\r\n\r\n" if at == "http socket" else b"m"
        if at == "memory socket, with a name":
            door.send(neighbour.name("vision").encode())
            assert door.recv(64) == b"+"
        with lingering() as descriptor:
            send(door, said, descriptor)
            assert neighbour.ask("GET", "/healthz").status_code == 200
            door.close()
            assert neighbour.ask("GET", "/healthz").status_code == 200


def test_who_comes_and_says_nothing_is_sent_away(neighbour: Neighbour, packed: Packed, policy: str) -> None:
    """And meanwhile the pod answers; afterwards memory is taken as before."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(40)]
        for each in silent:
            each.settimeout(PATIENCE_SECONDS)
            each.connect(f"{neighbour.path}.memory")
        assert neighbour.ask("GET", "/healthz").status_code == 200
        assert [each.recv(64) for each in silent] == [b""] * 40
    with neighbour.at_the_door() as door:
        assert hand_over(door, neighbour.name("vision"), memory()) == b"+"
    until_nothing_is_lent(neighbour)
    rank = rank_at(neighbour, packed, policy)
    kept = [rank.batch(0, np.arange(start, start + 100)) for start in (0, 100, 200)]
    assert neighbour.lent() > 0
    assert sum(batch.num_bytes for batch in kept) > 0


def rank_at(neighbour: Neighbour, packed: Packed, policy: str) -> Any:
    spec = JobSpec(f"of-vision-{policy}", packed[0], chunk_size=16, memory_bytes=600_000, policy=policy)
    shown = Credentials(token_file=str(neighbour.token_of_vision))
    return kind_of(spec)(f"unix:{neighbour.path}", spec, 0, None, 10, credentials=shown)


def memory(num_bytes: int = MEMORY_BYTES, *, sealed: bool = True, allocated: bool = True, flags: int = 0) -> int:
    fd = os.memfd_create("lent", os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, num_bytes)
    if allocated and num_bytes:
        os.posix_fallocate(fd, 0, num_bytes)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert num_bytes % mmap.PAGESIZE == 0
    return fd


def send(door: socket.socket, said: bytes, *fds: int) -> None:
    """And let go of the descriptors, in a thread: if the pod was quicker, it is this that takes long."""
    try:
        socket.send_fds(door, [said], list(fds))
    except PermissionError:  # since Linux 6.16 the pod does not even get them
        door.send(said)
    for fd in fds:
        threading.Thread(target=os.close, args=(fd,), daemon=True).start()


def hand_over(door: socket.socket, name: str, *fds: int) -> bytes:
    """What the pod says to it in the end."""
    door.send(name.encode())
    assert door.recv(64) == b"+"
    send_all = socket.send_fds(door, [b"m"], list(fds))
    assert send_all == 1
    for fd in fds:
        os.close(fd)
    return door.recv(64)


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
        descriptor = sender.detach()
        try:
            yield descriptor
        finally:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            reader.close()  # by a reset: nothing is left to linger for


def until_nothing_is_lent(neighbour: Neighbour) -> None:
    until(lambda: not neighbour.lent(), "the end of what is lent")


def test_memory_is_let_go_of_with_the_connection(neighbour: Neighbour, packed: Packed, policy: str) -> None:
    """At once, whenever the garbage collector comes."""
    gc.disable()
    try:
        rank = rank_at(neighbour, packed, policy)
        for start in (0, 100, 200):
            rank.batch(0, np.arange(start, start + 100))
        assert neighbour.lent() > 0
        del rank
        until_nothing_is_lent(neighbour)
    finally:
        gc.enable()
