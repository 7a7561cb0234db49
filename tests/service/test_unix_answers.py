"""How much of an answer does the kernel take from a pod at once over its Unix socket? Nearly a MiB, where it may."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
import uvloop

from refill_service.memory.loop_turns import LoopTurns
from refill_service.serving.listener import Listener

ANSWER = bytes(900_000)
MOST_SENT = Path("/proc/sys/net/core/wmem_max")


@pytest.mark.skipif(
    not MOST_SENT.exists() or int(MOST_SENT.read_text()) < 1 << 20, reason="this machine's kernel lets no process"
)
def test_an_answer_leaves_before_its_client_reads(tmp_path: Path) -> None:
    async def run() -> int:
        left: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        class Answers(asyncio.BufferedProtocol):
            def connection_made(self, transport: Any) -> None:
                transport.write(ANSWER)
                left.set_result(transport.get_write_buffer_size())

            def get_buffer(self, sizehint: int) -> bytearray:
                return bytearray(1)

        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(tmp_path / "pod.sock"))
        listening.listen()
        listener = Listener(listening, None, Answers, LoopTurns())
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "pod.sock"))
        found = await left
        writer.close()
        listener.close()
        await listener.wait_closed()
        return found

    assert uvloop.run(run()) == 0
