"""Which connections at the port for other pods have shown no pod, and end? The HTTP/2 server there has no limit for it.

It counts connections, and waits for the first bytes of each for ever: so many that are merely open would keep all pods
out. They can't be told apart in the server, so the kernel is asked which connections there are. One that no request
with a pod's token came over has ten seconds; where there are too many of these, the oldest give way.

A pod has one connection, or two, so that more than a few from one address are ended, too, the newest first: the server
holds something for each of them. So are those over which an answer was not read in time, and those of strangers who ask
for more than they are answered.

HTTP/2 allows so many requests at once, but one that the server resets for a fault is over at once, and leaves room for
the next: it passes on a thousand of each connection, as fast as they come, in a queue without an end. Who goes on like
that on new connections is not let in for a while: the kernel drops what comes to the port from that host. Connections
that come and go without having shown a pod tell. A thread looks: the loop would be behind that queue.
"""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress

log = logging.getLogger(__name__)

MOST_SILENT = 512
"""After a look; until the next one there may be as many more."""
_SILENT_SECONDS = 10.0
_LOOK_SECONDS, _MORE_SECONDS = 0.1, 0.001
"""And so much for each stranger of the last look."""
_REST_SECONDS = 3.0
"""Without a look, where the last one found no stranger: it takes the kernel half a millisecond."""
_CONNECTIONS_OF_A_POD = 4
_MOST_GONE = 6
"""Of one host, that showed no pod, in a second. More is a flood."""
_SHUT_OUT_SECONDS = 10.0
_MOST_SHUT_OUT = 16

Address = tuple[str, int]

# Of <linux/netlink.h>, <linux/sock_diag.h> and <linux/inet_diag.h>.
_SOCK_DIAG, _BY_FAMILY, _REQUEST, _DUMP, _FAILED, _DONE = 4, 20, 0x001, 0x300, 2, 3
_HEADER, _FAILURE = struct.Struct("=IHHII"), struct.Struct("=i")
_PORT, _NUMBER = struct.Struct("!H"), struct.Struct("=I")
_SOCKET_BYTES, _PORT_AT, _HOST_AT, _NUMBER_AT = 48, 6, 24, 68
_ESTABLISHED, _LISTENS = 1 << 1, 1 << 10
_ANSWERS_BYTES = 1 << 16

# Of <linux/filter.h>: instructions of the kernel's packet filter, and where in a packet its IP header is.
_STEP = struct.Struct("=HBBI")
_LOAD, _LOAD_BYTE, _SHIFT_RIGHT, _IS_EQUAL, _RETURN = 0x20, 0x30, 0x74, 0x15, 0x06
_IP_HEADER, _IPV4_SOURCE, _IPV6_SOURCE, _WORD_BYTES = 0xFFF00000, 12, 8, 4
_ATTACH, _ALL = 26, 0xFFFFFFFF


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
        self._over: deque[Address] = deque()
        """That are to be ended."""
        self._shut_out: dict[str, float] = {}
        """Hosts, and since when."""
        self._gone = Counter[str]()
        """Of each host, in this second, which began then:"""
        self._gone_since = 0.0
        self._cut: set[Address] = set()
        """By the look before."""
        self._looks = threading.Event()
        self._stops = False
        self._since: dict[Address, float] = {}
        """Of strangers, the oldest first."""

    def is_known(self, address: tuple[str, int | str]) -> None:
        """Fact: a pod asks from there."""
        self._known[_address(address)] = None

    def end(self, address: tuple[str, int | str]) -> None:
        """The connection from there."""
        self._over.append(_address(address))
        self._looks.set()

    def is_shut_out(self, address: tuple[str, int | str]) -> bool:
        """Whether nothing that comes from there is answered."""
        return bool(self._shut_out) and _plain(address[0]) in self._shut_out and _address(address) not in self._known

    def stranger_asks(self) -> None:
        """Fact: that is looked at soon."""
        if not self._since:
            self._looks.set()

    async def cut(self) -> None:
        """Goes on until it is cancelled."""
        try:
            await asyncio.to_thread(self._look_again_and_again)
        finally:
            self._stops = True
            self._looks.set()

    def _look_again_and_again(self) -> None:
        has_looked = False
        while not self._stops:
            looks = self._since or self._shut_out
            self._looks.wait(_LOOK_SECONDS + _MORE_SECONDS * len(self._since) if looks else _REST_SECONDS)
            self._looks.clear()
            try:
                self._cut_once()
                has_looked = True
            except (OSError, AttributeError) as error:  # no Linux, or one that does not tell; or no descriptor is left
                log.warning("connections at port %d that show no pod are not ended: %s", self._port, error)
                if not has_looked:
                    return

    def _cut_once(self) -> None:
        now, there_are = time.monotonic(), dict(self._connections())
        ended = {self._over.popleft() for _ in range(len(self._over))}  # another thread adds some
        known = dict.fromkeys(each for each in tuple(self._known) if each in there_are)
        self._known = known.copy()  # it grows meanwhile
        self._shut_out_floods(now, there_are)
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
        over |= {number for address, number in there_are.items() if address in since and address[0] in self._shut_out}
        self._cut = {address for address, number in there_are.items() if number in over}
        if over:
            _shut_down(over)

    def _shut_out_floods(self, now: float, there_are: dict[Address, int]) -> None:
        if now > self._gone_since + 1:
            self._gone.clear()
            self._gone_since = now
        known_or_there = (self._known, there_are, self._cut)
        self._gone.update(each[0] for each in self._since if not any(each in some for some in known_or_there))
        floods = [host for host, gone in self._gone.items() if gone > _MOST_GONE and host not in self._shut_out]
        still = {host: since for host, since in self._shut_out.items() if now < since + _SHUT_OUT_SECONDS}
        if floods or len(still) < len(self._shut_out):
            self._shut_out = still | dict.fromkeys(floods, now)
            with suppress(OSError):  # a kernel without such filters: what comes is ended at the next look
                self._drop_what_comes()
        for host in floods:
            log.warning("%s floods port %d, and shows no pod: shut out for %d s", host, self._port, _SHUT_OUT_SECONDS)

    def _drop_what_comes(self) -> None:
        """From hosts that are shut out, to the socket that listens. Those of other connections are as they were."""
        hosts = [ipaddress.ip_address(host) for host in list(self._shut_out)[-_MOST_SHUT_OUT:]]
        steps = _filter_of([host.packed for host in hosts])
        text = ctypes.create_string_buffer(steps, len(steps))
        program = struct.pack("HP", len(steps) // _STEP.size, ctypes.addressof(text))
        for listener in _sockets({number for _, number in self._connections(_LISTENS)}):
            with listener:
                listener.setsockopt(socket.SOL_SOCKET, _ATTACH, program)

    def _connections(self, state: int = _ESTABLISHED) -> Iterator[tuple[Address, int]]:
        """Who is connected, and the number of the socket here."""
        for answer in _asked_of_kernel(self._family, self._port, state):
            (port,) = _PORT.unpack_from(answer, _PORT_AT)
            host = ipaddress.ip_address(answer[_HOST_AT:][: 4 if self._family == socket.AF_INET else 16])
            yield (_plain(str(host)), port), *_NUMBER.unpack_from(answer, _NUMBER_AT)


def _filter_of(addresses: list[bytes]) -> bytes:
    """A program of the kernel's packet filter that drops what comes from these."""
    steps = [(_LOAD_BYTE, 0, 0, _IP_HEADER), (_SHIFT_RIGHT, 0, 0, 4)]
    for version, first, size_bytes in ((4, _IPV4_SOURCE, 4), (6, _IPV6_SOURCE, 16)):
        of_version = []
        for address in (each for each in addresses if len(each) == size_bytes):
            for at in range(0, size_bytes, _WORD_BYTES):
                words_behind = (size_bytes - at) // _WORD_BYTES - 1
                of_version.append((_LOAD, 0, 0, _IP_HEADER + first + at))
                of_version.append((_IS_EQUAL, 0, 2 * words_behind + 1, int.from_bytes(address[at:][:_WORD_BYTES])))
            of_version.append((_RETURN, 0, 0, 0))
        steps += [(_IS_EQUAL, 0, len(of_version) + 1, version), *of_version, (_RETURN, 0, 0, _ALL)]
    return b"".join(_STEP.pack(*step) for step in [*steps, (_RETURN, 0, 0, _ALL)])


def _asked_of_kernel(family: socket.AddressFamily, port: int, state: int) -> Iterator[bytes]:
    """What it says of each connection in this state at a port of this machine (sock_diag(7), ``struct inet_diag_msg``).
    Of thousands of others it says nothing, which ``/proc/net/tcp`` takes tens of milliseconds for."""
    asked = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, state)
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
    for found in _sockets(numbers):
        with found, suppress(OSError):  # closed meanwhile
            found.shutdown(socket.SHUT_RDWR)


def _sockets(numbers: set[int]) -> Iterator[socket.socket]:
    """Of this process, by their numbers; to be closed."""
    wanted = {f"socket:[{number}]" for number in numbers}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") not in wanted:
                continue
            found = socket.socket(fileno=os.dup(int(name)))
            if os.readlink(f"/proc/self/fd/{found.fileno()}") in wanted:  # still the same one
                yield found
            else:
                found.close()
