"""Connections that have shown no token give way to whoever comes, whatever they ask, and end when they are idle."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.waiting import until

from refill_service.cache_core.team_quotas import TeamQuotas
from refill_service.demo.local_cluster import LocalCluster
from refill_service.serving.listener import ConnectionRoom

TOKEN = "vision-0123456789abcdef"


class Connection:
    """Of a client that has a request under way."""

    is_idle = False

    def __init__(self, *, has_asked: bool) -> None:
        self.has_asked = has_asked
        self.gave_way = False

    def give_way(self) -> None:
        self.gave_way = True


def test_strangers_that_always_have_a_request_under_way_keep_nobody_out() -> None:
    """Each sends the next one before it has its answer. Who has asked for the first time may be of a team."""
    room = ConnectionRoom(2, TeamQuotas(lambda: ["vision"], 0.0, 10))
    new, stranger, late = (Connection(has_asked=has_asked) for has_asked in (False, True, False))
    assert room.enter(new)
    assert room.enter(stranger)
    assert room.enter(late)
    assert (new.gave_way, stranger.gave_way, late.gave_way) == (False, True, False)
    assert room.belongs_to(late, "vision")
    assert not room.enter(Connection(has_asked=False)), "nobody has been answered yet"


def test_a_connection_whose_body_came_behind_its_answer_ends_when_it_is_idle(
    tmp_path: Path,
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    settings: dict[str, str | int | float] = {"client_tokens": str(tmp_path / "token")}
    with LocalCluster(1, tmp_path, settings) as cluster:
        stranger = socket.create_connection(("127.0.0.1", cluster.ports[0]), timeout=30)
        stranger.sendall(b"POST /v1/x HTTP/1.1\r\nHost: pod\r\nContent-Length: 5\r\n\r\n")
        assert b" 401 " in stranger.recv(1 << 16)
        stranger.sendall(b"12345")
        until(lambda: stranger.recv(1) == b"", "its end")
