"""Connections that have shown no token give way to whoever comes, whatever they ask, and end when they are idle."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.waiting import until

from refill_service.demo.local_cluster import LocalCluster

TOKEN = "vision-0123456789abcdef"
ASK = b"GET /v1/x HTTP/1.1\r\nHost: pod\r\n\r\n"
MOST = 8


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("pod")
    (folder / "token").write_text(TOKEN)
    settings: dict[str, str | int | float] = {"client_tokens": str(folder / "token"), "max_connections": MOST}
    with LocalCluster(1, folder, settings) as cluster:
        yield cluster


def connected(pod: LocalCluster) -> socket.socket:
    return socket.create_connection(("127.0.0.1", pod.ports[0]), timeout=30)


def status_of(pod: LocalCluster) -> int:
    return httpx.get(f"{pod.pod_urls[0]}/v1/jobs", headers={"authorization": f"Bearer {TOKEN}"}, timeout=30).status_code


def test_strangers_that_always_have_a_request_under_way_keep_nobody_out(pod: LocalCluster) -> None:
    """Each sends the next one before it has its answer."""
    strangers = [connected(pod) for _ in range(MOST)]
    try:
        for each in strangers:
            each.sendall(2 * ASK)
            assert b" 401 " in each.recv(1 << 16)
        for _ in range(20):
            for each in strangers:
                each.setblocking(False)
                try:
                    each.recv(1 << 16)
                    each.sendall(20 * ASK)
                except OSError:  # nothing has come, or it has given way
                    pass
            assert status_of(pod) == 200
    finally:
        for each in strangers:
            each.close()


def test_a_connection_whose_body_came_behind_its_answer_ends_when_it_is_idle(
    tmp_path: Path,
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    settings: dict[str, str | int | float] = {"client_tokens": str(tmp_path / "token")}
    with LocalCluster(1, tmp_path, settings) as cluster, connected(cluster) as stranger:
        stranger.sendall(b"POST /v1/x HTTP/1.1\r\nHost: pod\r\nContent-Length: 5\r\n\r\n")
        assert b" 401 " in stranger.recv(1 << 16)
        stranger.sendall(b"12345")
        until(lambda: stranger.recv(1) == b"", "its end")
