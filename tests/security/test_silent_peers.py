"""Connections at the port for other pods that say nothing, or come and go: they end, and keep no pod out meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from tests.pod_fixtures import rank_of, settings_of
from tests.waiting import until, until_in_loop

from refill_service.demo.local_cluster import LocalCluster
from refill_service.serving.silent_peers import MOST_SILENT, SilentPeers

MOST_CONNECTIONS = 20
TOKEN = "pods-0123456789abcdef"


def test_connections_that_say_nothing_keep_no_pod_out(packed: tuple[str, dict[str, bytes]], tmp_path: Path) -> None:
    (tmp_path / "peers").write_text(TOKEN)
    settings: dict[str, str | int | float] = {
        "memory_bytes": "4MiB",
        "max_connections": MOST_CONNECTIONS,
        "peer_token": str(tmp_path / "peers"),
    }
    with LocalCluster(2, tmp_path, settings) as cluster, contextlib.ExitStack() as stack:
        silent = []
        for number in range(MOST_SILENT + 2 * MOST_CONNECTIONS):
            silent.append(stack.enter_context(socket.create_connection(("127.0.0.1", cluster.peer_ports[0]), 20)))
            if number % 2:
                silent[-1].sendall(b"PRI * HTTP/2.0\r\n")
        cluster.kill(1)
        cluster.restart(1)
        job = settings_of(packed[0], policy="redox", world_size=2)
        rank_of(cluster, job, rank=1).batch(0, np.arange(500))  # for which the successor asks the other pod
        own = {connection.getsockname()[1] for connection in silent}
        of_pods = asking_ports(cluster.peer_ports[0]) - own
        for connection in silent:
            connection.setblocking(False)
        until(lambda: all(map(is_over, silent)), "all of them are cut off")
        assert of_pods
        assert asking_ports(cluster.peer_ports[0]) == of_pods, "those of pods go on"


@pytest.mark.parametrize(
    ("listens", "floods", "other"), [("127.0.0.1", "127.0.0.2", "127.0.0.1"), ("::", "::1", "127.0.0.1")]
)
def test_a_host_whose_connections_come_and_go_is_shut_out_and_no_other(listens: str, floods: str, other: str) -> None:
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET

    async def run() -> None:
        with socket.create_server((listens, 0), family=family, dualstack_ipv6=listens == "::", backlog=100) as server:
            port = server.getsockname()[1]
            peers = SilentPeers(listens, port, 1)
            cutting = asyncio.create_task(peers.cut())
            kept = deque[socket.socket](maxlen=4)
            """Each stays for a while, so that it is seen."""

            def is_let_in(host: str) -> bool:
                peers.stranger_asks()
                to = host if ":" in host else "127.0.0.1"
                try:
                    kept.append(socket.create_connection((to, port), 1, source_address=(host, 0)))
                except TimeoutError:
                    return False
                return True

            try:
                await until_in_loop(lambda: not is_let_in(floods), "who floods is shut out")
                assert peers.is_shut_out((floods, "1"))
                assert is_let_in(other)
                assert not peers.is_shut_out((other, "1"))
            finally:
                cutting.cancel()
                for each in kept:
                    each.close()

    asyncio.run(run())


def asking_ports(port: int) -> set[int]:
    """From which ports of this machine there is a connection to this one."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        here, there, state = line.split()[1:4]
        if state == "01" and int(here.partition(":")[2], 16) == port:
            found.add(int(there.partition(":")[2], 16))
    return found


def is_over(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 10):
            pass  # what it was told before
        return True
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
