"""How a connection to one pod is opened: names, addresses, TLS. What is slow or silent here is so for ever."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trustme

from refill.errors import InvalidInput, PodUnreachable
from refill.pods.credentials import Credentials
from refill.pods.patience import spread_seconds
from refill.pods.pod_channel import PodChannel, Wait
from refill.pods.pod_link import PodLink
from refill.pods.tls_sessions import kept_context

LONG_SECONDS = 1000.0
"""Longer than a test may take: whoever waits for so long fails."""

Listeners = Callable[..., socket.socket]


@pytest.fixture
def listening() -> Iterator[Listeners]:
    """Makes sockets that listen on loopback, which the kernel answers for; nobody accepts."""
    with ExitStack() as stack:

        def listen(backlog: int = 8) -> socket.socket:
            server = stack.enter_context(socket.socket())
            server.bind(("127.0.0.1", 0))
            server.listen(backlog)
            return server

        yield listen


@pytest.fixture
def silent(listening: Listeners) -> Iterator[socket.socket]:
    """An address that drops what comes: its backlog is full."""
    server = listening(backlog=0)
    with ExitStack() as stack:
        for _ in range(3):  # takes one
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        yield server


def link_to(url: str, connect_timeout_seconds: float) -> PodLink:
    link = PodLink(url, Credentials(), connect_timeout_seconds)
    link.timeout = LONG_SECONDS
    return link


def name_leads_to(monkeypatch: pytest.MonkeyPatch, *servers: socket.socket) -> None:
    found = [(server.family, socket.SOCK_STREAM, 0, "", server.getsockname()) for server in servers]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: list(found))


def test_an_address_that_drops_everything_does_not_hold_up_the_next(
    silent: socket.socket, listening: Listeners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As RFC 8305 has it, and a name does whose DNS has an address of before beside the one of now."""
    name_leads_to(monkeypatch, silent)
    with pytest.raises(OSError, match=rf"can't connect to 127.0.0.1:{silent.getsockname()[1]}: timed out after 0.3 s"):
        link_to("http://refill-0.refill:8000", 0.3).connect()
    live = listening()
    name_leads_to(monkeypatch, silent, live)
    link = link_to("http://refill-0.refill:8000", LONG_SECONDS)
    link.connect()
    assert link.sock.getpeername() == live.getsockname()
    link.close()


def test_an_address_that_refuses_gives_way_at_once(
    silent: socket.socket, listening: Listeners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All fail: the error names each address, and what became of it."""
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        name_leads_to(monkeypatch, refusing, silent)
        with pytest.raises(OSError, match=r":\d+: Connection refused, 127.0.0.1:\d+: timed out after 0.3 s"):
            link_to("http://refill-0.refill:8000", 0.3).connect()
        live = listening()
        name_leads_to(monkeypatch, refusing, live)
        link = link_to("http://refill-0.refill:8000", LONG_SECONDS)
        link.connect()
        assert link.sock.getpeername() == live.getsockname()
        link.close()


def test_a_busy_pod_has_the_time_of_the_request_for_tls(tmp_path: Path) -> None:
    """Given up by the limit for connecting, its handshakes would be done in vain, again and again."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard: list[bytes] = []

        def serve() -> None:
            client = server.accept()[0]
            time.sleep(0.3)
            with context.wrap_socket(client, server_side=True) as accepted:
                heard.append(accepted.recv(1000))

        pod = threading.Thread(target=serve)
        pod.start()
        link = PodLink(
            f"https://127.0.0.1:{server.getsockname()[1]}", Credentials(ca_file=str(tmp_path / "ca.pem")), 0.1
        )
        link.send_request("GET", "/healthz", b"", {}, LONG_SECONDS)
        assert link.sock.gettimeout() == LONG_SECONDS
        pod.join()
        link.close()
    assert heard[0].startswith(b"GET /healthz")


def test_tls_that_is_broken_off_is_no_sign_that_a_pod_is_gone(tmp_path: Path) -> None:
    """A pod that has too many handshakes to do gives one up; the next one may come to an end."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            server.accept()[0].close()

        pod = threading.Thread(target=serve)
        pod.start()
        with pytest.raises(PodUnreachable, match="TLS") as found:
            PodChannel(Credentials(), 2).call(
                "GET", f"https://127.0.0.1:{server.getsockname()[1]}", "/healthz", Wait(LONG_SECONDS)
            )
        pod.join()
    assert found.value.details["handshake"]


def test_a_pod_that_is_silent_in_a_handshake_and_everywhere_else_gives_no_sign_of_life(listening: Listeners) -> None:
    """Whoever can ask another pod waits for so long, and no longer; else for the whole time of the request."""
    server = listening()  # nobody accepts
    url = f"https://127.0.0.1:{server.getsockname()[1]}"
    channel = PodChannel(Credentials(), 2)
    channel.silent_seconds = 0.3
    with pytest.raises(PodUnreachable, match="gives no sign of life") as found:
        channel.call("GET", url, "/healthz", Wait(LONG_SECONDS))
    assert "handshake" not in found.value.details
    channel.heard_at[url] = float("inf")  # it answers over other connections
    with pytest.raises(PodUnreachable, match="TLS") as found:
        channel.call("GET", url, "/healthz", Wait(0.6))
    assert found.value.details["handshake"]


def test_ranks_spread_their_connections_in_proportion_to_their_number() -> None:
    assert [spread_seconds(ranks) for ranks in (1, 16)] == [0, 0]
    assert spread_seconds(250) == 1
    assert spread_seconds(100_000) == spread_seconds(1000) == 4


def test_authorities_that_are_being_replaced_count_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As tokens do: a Secret that is empty for a moment ends no training. What never was one is refused."""
    file = tmp_path / "ca.pem"
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(file))
    before = kept_context(str(file))
    for content in (b"", b"nonsense"):
        file.write_bytes(content)
        assert kept_context(str(file)) is before
    file.unlink()
    assert kept_context(str(file)) is before
    assert "those that it held count on" in caplog.text
    trustme.CA().cert_pem.write_to_path(str(file))
    assert kept_context(str(file)) is not before
    with pytest.raises(InvalidInput, match="holds no certificates"):
        kept_context(str(tmp_path / "another.pem"))
