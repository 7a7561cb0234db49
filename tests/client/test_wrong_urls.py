"""A wrong port or scheme in a service's URL: said at once where it can't become right, else after a few seconds."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import trustme
from tests.client.conftest import DatasetOf

from refill.errors import InvalidInput, PodUnreachable, RefillError
from refill.pods import patience
from refill.pods.pod_failures import unreachable

POLICIES = pytest.mark.parametrize("policy", ["planned", "redox"])
FOR_EVER = 1e6
HTML = "\r\nContent-Length: 6\r\n\r\n<html>"


@contextmanager
def server(answers: Callable[[socket.socket], None], scheme: str = "http") -> Iterator[str]:
    """The URL of something that answers each connection like this, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    answers(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def says(answer: str) -> Callable[[socket.socket], None]:
    def answers(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(answer.encode())

    return answers


def closes(connection: socket.socket) -> None:
    connection.recv(1 << 16)


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def speaks_tls(authority: trustme.CA) -> Callable[[socket.socket], None]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    def answers(connection: socket.socket) -> None:
        context.wrap_socket(connection, server_side=True).close()

    return answers


@POLICIES
@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        ("SSH-2.0-OpenSSH_9.6\r\n", PodUnreachable, "no pod is there, but something that begins with SSH-2.0-OpenSSH"),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
            RefillError,
            "answered, but not as a pod does: .*<html>",
        ),
        (
            "HTTP/1.1 501 Unsupported\r\nContent-Length: 6\r\n\r\n<html>",
            InvalidInput,
            "answered with status 501: <html>",
        ),
        (
            "HTTP/1.1 308 Moved\r\nLocation: https://refill/v1\r\nContent-Length: 0\r\n\r\n",
            InvalidInput,
            "sends on to https://refill/v1: give the URL",
        ),
    ],
)
def test_what_is_no_pod(policy: str, answer: str, kind: type[RefillError], why: str) -> None:
    with server(says(answer)) as url, pytest.raises(kind, match=f"{url}.* {why}"):
        DatasetOf(url)(policy=policy, timeout_seconds=FOR_EVER).register()


@POLICIES
def test_tls_is_spoken_to_a_plain_port(policy: str) -> None:
    why = "it speaks no TLS there: write http://"
    with server(says(f"HTTP/1.1 400 Bad{HTML}"), "https") as url, pytest.raises(PodUnreachable, match=f"{url} .*{why}"):
        DatasetOf(url)(policy=policy, timeout_seconds=FOR_EVER).register()


@POLICIES
def test_a_port_of_tls_is_asked_without(policy: str, speaks_tls: Callable[[socket.socket], None]) -> None:
    why = "it speaks TLS there: write https://"
    with server(speaks_tls) as url, pytest.raises(PodUnreachable, match=f"{url} .*{why}"):
        DatasetOf(url)(policy=policy, timeout_seconds=FOR_EVER).register()


@POLICIES
def test_a_certificate_that_nobody_trusts(
    policy: str, speaks_tls: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_CERTIFICATE_SECONDS", 0.3)
    with server(speaks_tls, "https") as url, pytest.raises(PodUnreachable, match="certificate verify failed"):
        DatasetOf(url)(policy=policy, timeout_seconds=FOR_EVER).register()


@POLICIES
def test_a_certificate_of_another_name(
    policy: str, speaks_tls: Callable[[socket.socket], None], authority: trustme.CA, tmp_path: Path
) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with (
        server(speaks_tls, "https") as url,
        pytest.raises(PodUnreachable, match="certificate is not valid for 'localh"),
    ):
        DatasetOf(url.replace("127.0.0.1", "localhost"))(
            policy=policy, timeout_seconds=FOR_EVER, ca_file=str(tmp_path / "ca.pem")
        ).register()


def test_a_certificate_may_be_being_replaced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is said at once, since it may be a mistake, and tried for as long as a new Secret takes to get around."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: clock.now))
    first = patience.Patience(2, 300, is_first=True)
    wrong = ssl.SSLCertVerificationError(1, "certificate verify failed")
    wrong.verify_code = 20
    for clock.now in (1000.0, 1002.0, 1089.0):
        first.failed(unreachable("https://refill", wrong), "https://refill")
    at_once = caplog.messages[0]
    assert (
        "rank 2 has waited 0 s for https://refill, which has not taken its job yet, and tries on until 90 s" in at_once
    )
    assert "certificate verify failed. Are certificates being replaced? Else set REFILL_CA_FILE (ca_file)" in at_once
    clock.now = 1090.0
    with pytest.raises(PodUnreachable, match=r"rank 2 gives up on https://refill after 90 s: .*verify failed"):
        first.failed(unreachable("https://refill", wrong), "https://refill")


def test_what_comes_before_or_after_a_certificate_takes_none_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods that start, and restart, may take as long as ever."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: clock.now))
    first = patience.Patience(2, 300, is_first=True)
    wrong = ssl.SSLCertVerificationError(1, "certificate verify failed")
    wrong.verify_code = 20
    tries = [(1100.0, ConnectionRefusedError()), (1101.0, wrong), (1190.0, wrong), (1295.0, ConnectionRefusedError())]
    for clock.now, error in tries:
        first.failed(unreachable("https://refill", error), "https://refill")
    clock.now = 1296.0
    with pytest.raises(PodUnreachable, match="gives up on https://refill after 296 s"):
        first.failed(unreachable("https://refill", wrong), "https://refill")


@POLICIES
@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (closes, "is that the port of clients, and is its URL https where pods have TLS?"),
        (says(f"HTTP/1.1 502 Bad Gateway{HTML}"), "answered with status 502"),
    ],
)
def test_what_may_become_right_is_tried_again(policy: str, answers: Callable[[socket.socket], None], why: str) -> None:
    """Such as an ingress before pods that start."""
    asked: list[socket.socket] = []

    def counted(connection: socket.socket) -> None:
        asked.append(connection)
        answers(connection)

    with server(counted) as url, pytest.raises(PodUnreachable, match=why):
        DatasetOf(url)(policy=policy, timeout_seconds=0.5).register()
    assert asked


def test_it_is_said_after_three_seconds_and_then_every_ten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once something was answered, that may take the usual ten seconds."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: clock.now))
    first = patience.Patience(2, 300, is_first=True)
    said = []
    for clock.now in (1002.9, 1003.1, 1013.0, 1013.2):
        first.failed(PodUnreachable("connection refused"), "http://refill:9")
        said.append([record.getMessage() for record in caplog.records])
        caplog.clear()
    assert said == [
        [],
        [
            "rank 2 has waited 3 s for http://refill:9, which has not taken its job yet, and tries on until 300 s have "
            "passed (timeout_seconds): connection refused"
        ],
        [],
        ["rank 2 has waited 13 s for http://refill:9: connection refused"],
    ]
