"""Which connections at the port for other pods have shown no pod, and end? The HTTP/2 server there has no limit for it.

It counts connections, and waits for the first bytes of each for ever: so many that are merely open would keep all pods
out. They can't be told apart in the server, so the kernel is asked which connections there are. One that no request
with a pod's token came over has ten seconds; where there are too many of these, the oldest give way.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["MOST_SILENT", "SilentPeers"]

MOST_SILENT = 512
"""After a look; until the next one there may be as many more."""
_SILENT_SECONDS = 10.0
_LOOK_SECONDS = 1.0
_ESTABLISHED = "01"

Address = tuple[str, int]


class SilentPeers:
    """Of one port of this process."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._known: set[Address] = set()
        self._since: dict[Address, float] = {}
        """Of strangers, the oldest first."""

    def is_known(self, address: tuple[str, int | str]) -> None:
        """Fact: a pod asks from there."""
        host, port = address  # which granian has as text
        self._known.add((_plain(host), int(port)))

    async def cut(self) -> None:
        """Goes on until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.to_thread(self._cut_once)

    def _cut_once(self) -> None:
        now, there_are = time.monotonic(), dict(self._connections())
        self._known = {each for each in tuple(self._known) if each in there_are}
        since = {each: self._since.get(each, now) for each in there_are if each not in self._known}
        self._since = dict(sorted(since.items(), key=lambda each: each[1]))
        too_many = len(self._since) - MOST_SILENT
        over = {
            there_are[address]
            for place, (address, came) in enumerate(self._since.items())
            if place < too_many or now > came + _SILENT_SECONDS
        }
        if over:
            _shut_down(over)

    def _connections(self) -> Iterator[tuple[Address, str]]:
        """Who is connected, and the number of the socket here."""
        port = f":{self._port:04X} "  # of the few lines that are looked at, of perhaps thousands
        for table in ("tcp", "tcp6"):
            with suppress(OSError):  # no Linux, or no IPv6
                for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                    if port not in line:
                        continue
                    fields = line.split()
                    if fields[3] == _ESTABLISHED and int(fields[1].rpartition(":")[2], 16) == self._port:
                        yield _decoded(fields[2]), fields[9]


def _decoded(shown: str) -> Address:
    """As the kernel shows it: words of the address in the machine's order."""
    host, _, port = shown.partition(":")
    words = [int(host[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(host), 8)]
    return _plain(str(ipaddress.ip_address(b"".join(words)))), int(port, 16)


def _plain(host: str) -> str:
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _shut_down(numbers: set[str]) -> None:
    wanted = {f"socket:[{number}]" for number in numbers}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") not in wanted:
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if os.readlink(f"/proc/self/fd/{found.fileno()}") in wanted:  # still the same one
                    found.shutdown(socket.SHUT_RDWR)
