"""Which connections at the port for other pods have shown no pod, and end? The HTTP/2 server there has no limit for it.

It counts connections, and waits for the first bytes of each for ever: so many that are merely open would keep all pods
out. They can't be told apart in the server, so the kernel is asked which connections there are. One that no request
with a pod's token came over has ten seconds; where there are too many of these, the oldest give way.

A pod has one connection, or two, so that more than a few from one address are ended, too, the newest first: the server
holds something for each of them. So are those over which an answer was not read in time, and those of strangers who ask
for more than they are answered.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

__all__ = ["MOST_SILENT", "SilentPeers"]

log = logging.getLogger(__name__)

MOST_SILENT = 512
"""After a look; until the next one there may be as many more."""
_SILENT_SECONDS = 10.0
_LOOK_SECONDS = 1.0
_REST_SECONDS = 3.0
"""Without a look, where the last one found no stranger: it takes the kernel half a millisecond."""
_CONNECTIONS_OF_A_POD = 4

Address = tuple[str, int]

# Of <linux/netlink.h>, <linux/sock_diag.h> and <linux/inet_diag.h>.
_SOCK_DIAG, _BY_FAMILY, _REQUEST, _DUMP, _FAILED, _DONE = 4, 20, 0x001, 0x300, 2, 3
_HEADER, _FAILURE = struct.Struct("=IHHII"), struct.Struct("=i")
_PORT, _NUMBER = struct.Struct("!H"), struct.Struct("=I")
_SOCKET_BYTES, _PORT_AT, _HOST_AT, _NUMBER_AT = 48, 6, 24, 68
_ESTABLISHED = 1 << 1
_ANSWERS_BYTES = 1 << 16


class SilentPeers:
    """Cuts connections at one port of this process that have shown no pod in time.

    :param host: the address that it listens on.
    :param num_pods: that may share an address, as pods of one machine do.
    """

    def __init__(self, host: str, port: int, num_pods: int) -> None:
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._port = port
        self._most_of_one_host = _CONNECTIONS_OF_A_POD * max(2, num_pods)
        self._known: dict[Address, None] = {}
        """The oldest first."""
        self._over: set[Address] = set()
        """That are to be ended."""
        self._looks = asyncio.Event()
        self._since: dict[Address, float] = {}
        """Of strangers, the oldest first."""

    def is_known(self, address: tuple[str, int | str]) -> None:
        """Fact: a pod asks from there."""
        self._known[_address(address)] = None

    def end(self, address: tuple[str, int | str]) -> None:
        """The connection from there."""
        self._over.add(_address(address))
        self._looks.set()

    async def cut(self) -> None:
        """Goes on until it is cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS if self._since else _REST_SECONDS):
                    await self._looks.wait()
            self._looks.clear()
            try:
                await asyncio.to_thread(self._cut_once)
            except (OSError, AttributeError) as error:  # no Linux, or one that does not tell
                log.warning("connections at port %d that show no pod are not ended: %s", self._port, error)
                return

    def _cut_once(self) -> None:
        now, there_are = time.monotonic(), dict(self._connections())
        ended, self._over = self._over, set()
        known = dict.fromkeys(each for each in tuple(self._known) if each in there_are)
        self._known = known.copy()  # it grows meanwhile
        since = {each: self._since.get(each, now) for each in there_are if each not in known}
        self._since = dict(sorted(since.items(), key=lambda each: each[1]))
        too_many = len(self._since) - MOST_SILENT
        over = {
            there_are[address]
            for place, (address, came) in enumerate(self._since.items())
            if place < too_many or now > came + _SILENT_SECONDS
        }
        over |= {there_are[address] for address in ended if address in there_are}
        of_hosts = Counter[str]()
        for address in known:
            of_hosts[address[0]] += 1
            if of_hosts[address[0]] > self._most_of_one_host:
                over.add(there_are[address])
        if over:
            _shut_down(over)

    def _connections(self) -> Iterator[tuple[Address, int]]:
        """Who is connected, and the number of the socket here."""
        for answer in _asked_of_kernel(self._family, self._port):
            (port,) = _PORT.unpack_from(answer, _PORT_AT)
            host = ipaddress.ip_address(answer[_HOST_AT:][: 4 if self._family == socket.AF_INET else 16])
            yield (_plain(str(host)), port), *_NUMBER.unpack_from(answer, _NUMBER_AT)


def _asked_of_kernel(family: socket.AddressFamily, port: int) -> Iterator[bytes]:
    """What it says of each established connection at a port of this machine (sock_diag(7), ``struct inet_diag_msg``).
    Of thousands of others it says nothing, which ``/proc/net/tcp`` takes tens of milliseconds for."""
    asked = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, _ESTABLISHED)
    asked += _PORT.pack(port) + bytes(_SOCKET_BYTES - _PORT.size)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.send(_HEADER.pack(_HEADER.size + len(asked), _BY_FAMILY, _REQUEST | _DUMP, 0, 0) + asked)
        while True:
            answers = kernel.recv(_ANSWERS_BYTES)
            while answers:
                size, kind, *_ = _HEADER.unpack_from(answers)
                if kind == _FAILED:
                    (number,) = _FAILURE.unpack_from(answers, _HEADER.size)
                    raise OSError(-number, os.strerror(-number))
                if kind == _DONE:
                    return
                yield answers[_HEADER.size : size]
                answers = answers[-(-size // 4) * 4 :]


def _address(given: tuple[str, int | str]) -> Address:
    host, port = given  # which granian has as text
    return _plain(host), int(port)


def _plain(host: str) -> str:
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _shut_down(numbers: set[int]) -> None:
    wanted = {f"socket:[{number}]" for number in numbers}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") not in wanted:
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if os.readlink(f"/proc/self/fd/{found.fileno()}") in wanted:  # still the same one
                    found.shutdown(socket.SHUT_RDWR)
