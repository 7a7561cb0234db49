"""Connections to other pods: what waits for what."""

from __future__ import annotations

import asyncio

from refill_service.demo.local_cluster import LocalCluster
from refill_service.peers.peers import Peers

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
