"""When is a connection cut that waits for nothing but its client's TLS goodbye, or that nobody can tell anything of?"""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from refill_service.serving.client_protocol import ClientServer, _LimitedProtocol


class _Transport:
    """With as many bytes to send, and a socket."""

    def __init__(self, to_send: int, connection: socket.socket | None) -> None:
        self.to_send, self.connection, self.closing, self.aborted = to_send, connection, False, False

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.to_send

    def get_extra_info(self, name: str) -> Any:
        return self.connection if name == "socket" else None

    def abort(self) -> None:
        self.aborted = True


def _protocol(transport: _Transport) -> Any:
    protocol: Any = object.__new__(_LimitedProtocol)
    protocol.transport = transport
    return protocol


def test_when_it_is_closed_and_all_was_sent_at_two_looks() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport = _Transport(100, ours)
        protocol = _protocol(transport)
        assert [protocol.is_half_closed() for _ in range(2)] == [False, False], "it is open"
        transport.closing = True
        assert [protocol.is_half_closed() for _ in range(2)] == [False, False], "something is to be sent"
        transport.to_send = 0
        assert [protocol.is_half_closed() for _ in range(2)] == [False, True]


def test_a_connection_that_has_just_gone_has_no_socket() -> None:
    transport = _Transport(0, None)
    transport.closing = True
    protocol = _protocol(transport)
    assert [protocol.is_half_closed() for _ in range(2)] == [False, True]


def test_a_connection_that_nobody_can_tell_anything_of_is_cut_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """An error in the look at one ended the server, and the pod with it."""

    class Broken(_LimitedProtocol):
        def is_slow(self, now: float) -> bool:
            raise AttributeError("'NoneType' object has no attribute 'fileno'")

    class Healthy(_LimitedProtocol):
        def is_slow(self, now: float) -> bool:
            return False

    connections: list[Any] = [object.__new__(kind) for kind in (Broken, Healthy)]
    for connection in connections:
        connection.transport = _Transport(0, None)
    server: Any = object.__new__(ClientServer)
    server.server_state = SimpleNamespace(connections=connections)
    server.cut()
    assert [connection.transport.aborted for connection in connections] == [True, False]
    assert "has no attribute 'fileno'" in caplog.text
