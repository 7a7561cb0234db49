"""How does one machine stand for several hosts, with a store that is far away and behind a narrow link?

    python benchmarks/shaped_network.py     # makes one, measures it, removes it

Every host is a network namespace, all on one bridge. The store's link alone is limited, both ways, by ``tc tbf``, and
far away: what arrives at the store is held for one round trip (hold_packets.c; not every kernel has netem). All of
the round trip lies on the way to the store, where requests and acknowledgements are few, so that the bulk of the
answers never passes through user space and the holding cannot be what limits the link.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import httpx
from machine import machine

__all__ = ["LinkSpeed", "ShapedNetwork"]

NEEDS = {"ip": "iproute2", "tc": "iproute2"}
NEEDS_TO_HOLD = {
    "iptables-legacy": "iptables",
    "gcc": "gcc",
    "/usr/include/libmnl/libmnl.h": "libmnl-dev",
    "/usr/include/libnetfilter_queue/libnetfilter_queue.h": "libnetfilter-queue-dev",
}
PREFIX = "refill-bench"
HOSTS = ("store", "pod0", "pod1", "pod2", "trainer")
BURST_BYTES = 512 * 1024
QUEUE_SECONDS = 0.05
"""What the link's queue holds before it drops: two round trips of 25 ms."""
CLONE_NEWNET = 0x40000000
_START_SECONDS = 60


class LinkSpeed:
    """What plain sockets get through the store's link: the floor of everything else that is measured on it.

    ``rtt_seconds``: median of single bytes there and back. ``payload_bytes_per_second``: what the receivers got.
    ``share``: bytes on the wire, with headers, of what the link could carry in that time.
    """

    def __init__(self, rtt_seconds: float, payload_bytes_per_second: float, share: float) -> None:
        self.rtt_seconds = rtt_seconds
        self.payload_bytes_per_second = payload_bytes_per_second
        self.share = share


class ShapedNetwork:
    """Made on entry; on exit everything that ran in it is killed and it is removed. Needs root.

    :param hosts: names; ``store`` is the one behind the link.
    :param store_mbit: rate of the store's link, each way, in 10^6 bits per second; 0: unlimited.
    :param rtt_ms: round trip between the store and any other host.
    :param congestion_control: of TCP, in every host.
    """

    def __init__(
        self,
        hosts: Sequence[str] = HOSTS,
        *,
        store_mbit: float,
        rtt_ms: float = 25,
        congestion_control: str = "bbr",
    ) -> None:
        self.hosts = tuple(hosts)
        self.store_mbit = store_mbit
        self.rtt_ms = rtt_ms
        self._congestion_control = congestion_control
        self._prefix = f"{PREFIX}-{os.getpid()}-"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> ShapedNetwork:
        _check_that_it_can_work(NEEDS | (NEEDS_TO_HOLD if self.rtt_ms else {}))
        _remove_leftovers()
        signal.signal(signal.SIGTERM, _end)
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, host: str) -> str:
        return f"10.77.0.{self.hosts.index(host) + 11}"

    def run(
        self, host: str, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a process on a host. It dies with this one, and at the latest when the network is removed.

        Ctrl-C does not reach it. ``env`` is all of its environment; ``options`` are those of ``subprocess.Popen``.
        """
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self._prefix + host, *argv],
            env=env,
            start_new_session=True,
            **{"stdin": subprocess.DEVNULL, **options},
        )
        self._processes.append(process)
        return process

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Sockets that this thread makes meanwhile, and processes and threads that it starts, are on the host."""
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{self._prefix}{host}", os.O_RDONLY)
        try:
            _enter_namespace(there)
            try:
                yield
            finally:
                _enter_namespace(here)
        finally:
            os.close(here)
            os.close(there)

    def wait_for(self, host: str, url: str, log: Path) -> None:
        """Until a server there answers. Raises :class:`SystemExit` with the end of its log where none does in time.

        :param host: from which it is asked.
        """
        deadline = time.monotonic() + _START_SECONDS
        with self.inside(host):
            while time.monotonic() < deadline:
                try:
                    if httpx.get(url, timeout=2, trust_env=False).status_code < 500:
                        return
                except httpx.TransportError:
                    time.sleep(0.1)
        said = log.read_text(errors="replace").strip()[-500:]
        raise SystemExit(f"error: {url} did not answer within {_START_SECONDS} s: {said}")

    def limit(self, host: str, mbit: float) -> None:
        """A host's link has this rate from now on, each way."""
        queue_bytes = int(BURST_BYTES + mbit * 1e6 / 8 * QUEUE_SECONDS)
        limit = ("tbf", "rate", f"{mbit}mbit", "burst", str(BURST_BYTES), "limit", str(queue_bytes))
        self._in(host, "tc", "qdisc", "replace", "dev", "eth0", "root", *limit)
        self._in("switch", "tc", "qdisc", "replace", "dev", host, "root", *limit)

    def store_link_bytes(self) -> int:
        """Bytes, with all headers, that have left the store so far, as its rate limit counts them."""
        out = self._in("store", "tc", "-s", "-j", "qdisc", "show", "dev", "eth0")
        return int(next(qdisc["bytes"] for qdisc in json.loads(out) if qdisc.get("root")))

    def share_of_link(self, link_bytes: float, seconds: float) -> float:
        """Part of what the link can carry in that time, one way."""
        return link_bytes / (self.store_mbit * 1e6 / 8 * seconds) if self.store_mbit else 0.0

    def measure(self, streams_of: Mapping[str, int] | None = None, seconds: float = 3) -> LinkSpeed:
        """Round trip and rate by plain sockets: the store sends, each host of ``streams_of`` receives that many."""
        if streams_of is None:
            streams_of = {host: 4 for host in self.hosts if host.startswith("pod")}
        with self.inside("store"):
            server = socket.create_server((self.address("store"), 0), backlog=256)
        threading.Thread(target=_serve, args=(server,), daemon=True).start()
        port = server.getsockname()[1]
        with self.inside(next(iter(streams_of))):
            rtt_seconds = _round_trip(self.address("store"), port)
        receivers = [
            self.run(
                host,
                [sys.executable, __file__, "receive", self.address("store"), str(port), str(streams), str(seconds + 2)],
                stdout=subprocess.PIPE,
            )
            for host, streams in streams_of.items()
        ]
        time.sleep(1.5)  # slow start, and the start of the receivers
        counted, started = self.store_link_bytes(), time.monotonic()
        time.sleep(seconds)
        counted, taken = self.store_link_bytes() - counted, time.monotonic() - started
        # Each receiver prints what it got per second from its first second on.
        rates = [float(receiver.communicate(timeout=60)[0]) for receiver in receivers]
        server.close()
        return LinkSpeed(rtt_seconds, sum(rates), self.share_of_link(counted, taken))

    def set_initial_window(self, packets: int) -> None:
        """How much the store sends on a new or idle connection before the first acknowledgement (Linux: 10 packets).

        A large one leaves TCP's slow start out, so that what is left of a time are the round trips of who asks.
        """
        network = self.address("store").rpartition(".")[0] + ".0/24"
        self._in("store", "ip", "route", "change", network, "dev", "eth0", "initcwnd", str(packets))

    def first_bytes_seconds(self, hosts: Sequence[str], sizes: Sequence[int]) -> float:
        """Until each host has got ``sizes`` bytes, one after another over one new connection, by plain sockets."""
        with self.inside("store"):
            server = socket.create_server((self.address("store"), 0), backlog=256)
        threading.Thread(target=_serve, args=(server,), daemon=True).start()
        seconds = [0.0] * len(hosts)

        def fetch(number: int) -> None:
            started = time.perf_counter()
            with self.inside(hosts[number]), socket.create_connection(server.getsockname(), 10) as connection:
                for size in sizes:
                    connection.sendall(b"n" + size.to_bytes(8, "little"))
                    got = 0
                    while got < size:
                        got += len(connection.recv(1 << 20))
            seconds[number] = time.perf_counter() - started

        threads = [threading.Thread(target=fetch, args=(number,)) for number in range(len(hosts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.close()
        return max(seconds)

    def _make(self) -> None:
        _run("ip", "netns", "add", self._prefix + "switch")
        self._in("switch", "ip", "link", "add", "bridge", "type", "bridge")
        self._in("switch", "ip", "link", "set", "bridge", "up")
        for host in self.hosts:
            _run("ip", "netns", "add", self._prefix + host)
            port = ("type", "veth", "peer", "name", host, "netns", self._prefix + "switch")
            self._in(host, "ip", "link", "add", "eth0", *port)
            self._in("switch", "ip", "link", "set", host, "master", "bridge", "up")
            self._in(host, "ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            self._in(host, "ip", "link", "set", "lo", "up")
            self._in(host, "ip", "link", "set", "eth0", "up")
            for setting in (
                f"net.ipv4.tcp_congestion_control={self._congestion_control}",
                # Room for several round trips of bytes in one connection.
                "net.ipv4.tcp_wmem=4096 1048576 33554432",
                "net.ipv4.tcp_rmem=4096 1048576 33554432",
            ):
                self._in(host, "sysctl", "-qw", setting)
        if self.store_mbit:
            self.limit("store", self.store_mbit)
        if self.rtt_ms:
            self._hold_packets()

    def _hold_packets(self) -> None:
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
            program = Path(folder) / "hold_packets"
            source = Path(__file__).with_name("hold_packets.c")
            _run("gcc", "-O2", "-o", str(program), str(source), "-lnetfilter_queue", "-lmnl")
            holder = self.run("store", [str(program), "0", str(int(self.rtt_ms * 1000))], stdout=subprocess.PIPE)
            assert holder.stdout is not None
            if holder.stdout.readline() != b"ready\n":
                raise SystemExit("error: hold_packets did not start: is NFQUEUE missing from this kernel?")
        rule = ("-t", "mangle", "-A", "PREROUTING", "-i", "eth0", "-j", "NFQUEUE", "--queue-num", "0")
        self._in("store", "iptables-legacy", *rule)

    def _in(self, host: str, *argv: str) -> str:
        return _run("ip", "netns", "exec", self._prefix + host, *argv)

    def _remove(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        _remove_namespaces(self._prefix)


def _end(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends what runs in the network, and removes it, as Ctrl-C does."""
    sys.exit(128 + number)


def _check_that_it_can_work(needs: Mapping[str, str]) -> None:
    if os.geteuid() != 0:
        raise SystemExit("error: network namespaces need root: run this as root")
    missing = {package for tool, package in needs.items() if not (shutil.which(tool) or Path(tool).exists())}
    if missing:
        raise SystemExit(f"error: tools are missing: apt-get install {' '.join(sorted(missing))}")


def _remove_leftovers() -> None:
    """Networks of runs that were killed: those whose process is gone."""
    for name in _namespaces():
        pid = name.removeprefix(f"{PREFIX}-").partition("-")[0]
        if name.startswith(f"{PREFIX}-") and not Path(f"/proc/{pid}").exists():
            _remove_namespaces(f"{PREFIX}-{pid}-")


def _remove_namespaces(prefix: str) -> None:
    for name in _namespaces():
        if name.startswith(prefix):
            for pid in _run("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _run("ip", "netns", "delete", name)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]


def _enter_namespace(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        raise SystemExit(f"error: {' '.join(argv)}: {reason[0]}")
    return done.stdout


def _serve(server: socket.socket) -> None:
    """To who sends ``p`` each byte back; to ``s`` bytes without end; to ``n`` and a number that many bytes."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    block = memoryview(bytes(1 << 20))
    with connection, contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while what := connection.recv(1):
            if what == b"p":
                connection.sendall(what)
            if what == b"n":
                connection.sendall(bytes(int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")))
            while what == b"s":
                connection.sendall(block)


def _round_trip(address: str, port: int) -> float:
    with socket.create_connection((address, port), 10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(11):
            started = time.perf_counter()
            connection.sendall(b"p")
            connection.recv(1)
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _receive(address: str, port: int, streams: int, seconds: float) -> float:
    """Bytes per second that all streams get, the first second left out."""
    counts = [0] * streams
    connections = [socket.create_connection((address, port), 10) for _ in range(streams)]
    for number, connection in enumerate(connections):
        threading.Thread(target=_drain, args=(connection, counts, number), daemon=True).start()
        connection.sendall(b"s")
    time.sleep(1)
    before, started = sum(counts), time.monotonic()
    time.sleep(seconds - 1)
    rate = (sum(counts) - before) / (time.monotonic() - started)
    for connection in connections:
        connection.close()
    return rate


def _drain(connection: socket.socket, counts: list[int], number: int) -> None:
    buffer = bytearray(1 << 20)
    with contextlib.suppress(OSError):
        while received := connection.recv_into(buffer):
            counts[number] += received


def main() -> None:
    if sys.argv[1:2] == ["receive"]:
        _, _, address, port, streams, seconds = sys.argv
        print(_receive(address, int(port), int(streams), float(seconds)), flush=True)
        os._exit(0)
    print(machine())
    print(f"{'link':>12} {'control':8} {'streams':>8} {'RTT, ms':>8} {'of the link':>12} {'payload MB/s':>13}")
    for mbit in (0, 800, 1600):
        for control in ("bbr", "reno"):
            with ShapedNetwork(store_mbit=mbit, congestion_control=control) as network:
                for count in (1, 4):
                    speed = network.measure({"pod0": count, "pod1": count, "pod2": count}, 2)
                    share = f"{speed.share:12.3f}" if mbit else " " * 12
                    print(
                        f"{f'{mbit} mbit' if mbit else 'unlimited':>12} {control:8} {3 * count:8}"
                        f" {speed.rtt_seconds * 1000:8.1f} {share} {speed.payload_bytes_per_second / 1e6:13.1f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
