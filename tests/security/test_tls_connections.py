"""What does a connection with TLS make a pod hold? A few records, whatever clients do; and nothing when it is gone.

Held against what the pod promises: the peak of its resident set.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import trustme
from tests.waiting import until

from refill.protocol.wire_format import BatchRequest
from refill_service.demo.local_cluster import LocalCluster
from refill_service.settings import load_settings

TOKEN = "vision-0123456789abcdef"
SHOWN = f"Authorization: Bearer {TOKEN}\r\n".encode()
ASK = b"GET /v1/pods HTTP/1.1\r\nHost: pod\r\n" + SHOWN + b"\r\n"
PROBE = b"GET /healthz HTTP/1.1\r\nHost: pod\r\n\r\n"
MEMORY_BYTES = 16 << 20
NUM_ANSWERED, WARM = 64, 12
"""Connections that stay open; a pod is warm after some: what else it takes meanwhile is divided among the rest."""
HANDSHAKE = b"\x16\x03\x01\x40\x00"
"""How a record of 16 KiB of a handshake begins."""
ENDLESS_HELLO = HANDSHAKE + b"\x01\x02\x00\x00" + bytes((16 << 10) - 4) + 7 * (HANDSHAKE + bytes(16 << 10))
BODY = b"Content-Length: 1000000\r\n\r\n" + b"x" * 999_999


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", common_name="refill")
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    (folder / "tokens").write_text(TOKEN)
    return folder


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[LocalCluster]:
    with secured_pod(tmp_path_factory.mktemp("pod"), folder) as pod:
        yield pod


@pytest.fixture
def fresh_pod(tmp_path: Path, folder: Path) -> Iterator[LocalCluster]:
    """Nothing has made its resident set larger before."""
    with secured_pod(tmp_path, folder) as pod:
        yield pod


@contextlib.contextmanager
def secured_pod(logs: Path, folder: Path) -> Iterator[LocalCluster]:
    settings: dict[str, str | int | float] = {
        "memory_bytes": MEMORY_BYTES,
        "pinned_fraction": 0,
        "client_tokens": str(folder / "tokens"),
        "tls_cert": str(folder / "cert.pem"),
        "tls_key": str(folder / "key.pem"),
    }
    with LocalCluster(1, logs, settings, {"REFILL_CA_FILE": str(folder / "ca.pem")}) as cluster:
        yield cluster
        assert cluster.processes[0].poll() is None
        assert "Traceback" not in cluster.log(0)


@pytest.fixture(scope="module")
def tls(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "ca.pem"))


def connected(pod: LocalCluster, tls: ssl.SSLContext) -> ssl.SSLSocket:
    connection = socket.create_connection(("127.0.0.1", pod.ports[0]), timeout=60)
    return tls.wrap_socket(connection, server_hostname="127.0.0.1")


def memory_bytes(pod: LocalCluster, which: str) -> int:
    lines = Path(f"/proc/{pod.processes[0].pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(which))) << 10


def head_of(connection: ssl.SSLSocket) -> tuple[bytes, bytes]:
    """Head, and what has come of the body."""
    came = b""
    while b"\r\n\r\n" not in came:
        piece = connection.recv(1 << 16)
        assert piece, came
        came += piece
    head, _, rest = came.partition(b"\r\n\r\n")
    return head, rest


def answer_of(connection: ssl.SSLSocket, most_bytes: int = 1 << 16) -> bytes:
    """The body; read in pieces of so many bytes."""
    head, body = head_of(connection)
    assert head.startswith(b"HTTP/1.1 200"), head
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    pieces, left = [body], length - len(body)
    while left:
        pieces.append(connection.recv(min(left, most_bytes)))
        assert pieces[-1]
        left -= len(pieces[-1])
    return b"".join(pieces)


@pytest.fixture(scope="module")
def batch(pod: LocalCluster, packed: tuple[str, dict[str, bytes]], folder: Path) -> bytes:
    """A request for 900 KB, nearly, all of which are in memory."""
    with httpx.Client(
        base_url=pod.pod_urls[0],
        verify=ssl.create_default_context(cafile=str(folder / "ca.pem")),
        headers={"authorization": f"Bearer {TOKEN}"},
        timeout=60,
    ) as client:
        settings = {"dataset": packed[0], "policy": "planned", "memory_bytes": 8 << 20}
        registered = client.put("/v1/jobs/large", json=settings)
        assert registered.status_code == 200, registered.text
        path = f"/v1/jobs/large/planned/batch?plan={registered.json()['plan_id']}"
        body = BatchRequest(0, 0, np.arange(1000)).encode()
        assert client.post(path, content=body).status_code == 200
    return f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n".encode() + SHOWN + b"\r\n" + body


def test_a_client_that_was_answered_holds_nothing_of_its_answer(
    pod: LocalCluster, tls: ssl.SSLContext, batch: bytes
) -> None:
    with contextlib.ExitStack() as stack:
        before = 0
        for number in range(NUM_ANSWERED):
            connection = stack.enter_context(connected(pod, tls))
            connection.sendall(batch)
            assert len(answer_of(connection)) > 500_000
            if number == WARM:
                before = memory_bytes(pod, "VmRSS")
        each = (memory_bytes(pod, "VmRSS") - before) // (NUM_ANSWERED - 1 - WARM)
    assert each < 250_000, "bytes for each connection that is open: an answer has twice as many"


def test_connections_that_are_gone_leave_nothing(pod: LocalCluster, tls: ssl.SSLContext) -> None:
    """However they ended."""
    before = 0
    for number in range(350):
        if number == 100:
            before = memory_bytes(pod, "VmRSS")
        with connected(pod, tls) as connection:
            connection.sendall(ASK)
            answer_of(connection)
            if number % 3 == 0:
                connection.sendall(ASK)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif number % 3 == 1:
                connection.unwrap()
    assert (memory_bytes(pod, "VmRSS") - before) // 250 < 15_000, "bytes for each connection that is gone"


def test_a_client_that_reads_slowly_gets_all_of_its_answer(
    pod: LocalCluster, tls: ssl.SSLContext, batch: bytes
) -> None:
    with connected(pod, tls) as quick, connected(pod, tls) as slow:
        quick.sendall(batch)
        expected = answer_of(quick)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)  # by less, the kernel waits 0.2 s a piece
        slow.sendall(batch)
        for _ in range(50):
            with connected(pod, tls) as other:
                other.sendall(ASK)
                answer_of(other)
        assert answer_of(slow, 8000) == expected
        slow.sendall(ASK)
        answer_of(slow)


def test_a_request_in_many_records_and_with_a_body_is_understood(
    pod: LocalCluster, tls: ssl.SSLContext, batch: bytes
) -> None:
    with connected(pod, tls) as connection:
        for start in range(0, len(batch), 97):
            connection.sendall(batch[start : start + 97])
        assert len(answer_of(connection)) > 500_000


def test_who_sends_tiny_records_on_and_on_is_cut_off(pod: LocalCluster, tls: ssl.SSLContext) -> None:
    """As changes of keys are, of which one costs as much as a request. A request may end with one."""
    came = b"?"
    with connected(pod, tls) as connection, contextlib.suppress(OSError):
        for letter in ASK[:-2] + b"X: " + b"x" * 500 + b"\r\n\r\n":
            connection.sendall(bytes([letter]))
        came = connection.recv(1)
    assert came in (b"", b"?"), "it was answered"
    with connected(pod, tls) as other:
        for _ in range(100):
            other.sendall(ASK[:-2])
            other.sendall(ASK[-2:])
            answer_of(other)


@pytest.mark.parametrize("sent", [ENDLESS_HELLO, ASK, bytes(100), b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00"])
def test_what_is_no_handshake_is_cut_off(pod: LocalCluster, tls: ssl.SSLContext, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", pod.ports[0]), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        with contextlib.suppress(ConnectionError):
            while connection.recv(1000):
                pass  # what was wrong, as TLS says it
    with connected(pod, tls) as other:
        other.sendall(ASK)
        answer_of(other)


def test_after_its_goodbye_a_client_is_let_go(pod: LocalCluster, tls: ssl.SSLContext) -> None:
    with connected(pod, tls) as connection:
        connection.sendall(ASK.replace(b"Host: pod\r\n", b"Host: pod\r\nConnection: close\r\n"))
        answer_of(connection)
        assert connection.recv(100) == b"", "the pod's goodbye"


ATTACKS: dict[str, tuple[int, bytes]] = {
    "nothing": (2_500, b""),
    "hellos that do not end": (1_000, ENDLESS_HELLO[: 31 << 10]),
    "bodies of strangers": (2_500, b"PUT /v1/jobs/x HTTP/1.1\r\n" + BODY),
    "bodies of a team": (2_000, b"PUT /v1/jobs/x HTTP/1.1\r\n" + SHOWN + BODY),
}


@pytest.mark.slow_attack
@pytest.mark.timeout(300)
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_comes_over_tls_is_held_within_bounds(fresh_pod: LocalCluster, tls: ssl.SSLContext, attack: str) -> None:
    count, sent = ATTACKS[attack]
    with contextlib.ExitStack() as stack:
        left: dict[socket.socket, bytes] = {}
        for _ in range(count):
            connection: socket.socket
            try:
                if sent.startswith(HANDSHAKE):
                    connection = socket.create_connection(("127.0.0.1", fresh_pod.ports[0]), timeout=60)
                else:
                    connection = connected(fresh_pod, tls)
            except OSError:
                continue  # it gave way to another one
            connection.setblocking(False)
            left[stack.enter_context(connection)] = sent
        idle_rounds = 0
        while idle_rounds < 3:
            before = sum(map(len, left.values()))
            for connection, rest in list(left.items()):
                try:
                    left[connection] = rest[connection.send(rest[: 64 << 10]) :] if rest else b""
                except (ssl.SSLWantWriteError, ssl.SSLWantReadError, BlockingIOError):
                    continue
                except OSError:
                    left[connection] = b""
            with connected(fresh_pod, tls) as kubelet:
                kubelet.sendall(PROBE)
                answer_of(kubelet)
            idle_rounds = idle_rounds + 1 if sum(map(len, left.values())) == before else 0
        peak, promised = memory_bytes(fresh_pod, "VmHWM"), load_settings(memory_bytes=MEMORY_BYTES).promised_bytes
        print(f"peak {peak >> 20} MiB of {promised >> 20} promised")
        assert peak < promised

    def is_served() -> bool:
        with connected(fresh_pod, tls) as after:
            after.sendall(ASK)
            return head_of(after)[0].startswith(b"HTTP/1.1 200")

    until(is_served, "the next one is answered")
