"""How do pods run on one machine? Each as a process of its own on loopback, stopped with whoever started them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import httpx

from refill.errors import PodUnreachable
from refill.pods.credentials import CA_FILE_VARIABLE, Credentials
from refill_service.interrupts import interrupts_after

_START_SECONDS = 120
"""A machine may be busy with much else. A pod that can't start ends, which is seen at once."""
_PORTS = range(20_000, 32_000)
"""Below those that Linux gives to connections, so that none takes a pod's port while it is restarted."""
_STOP_SECONDS = 15
STOP_SIGNAL = signal.SIGTERM
"""Tests, which leave hundreds of pods behind, have another one, and another :func:`start_process`."""


class LocalCluster:
    """``num_pods`` pods that know each other. A context manager: started on entry, stopped on exit.

    :param log_folder: each pod writes ``pod-N.log`` there.
    :param settings: further settings of every pod, by their names, such as ``memory_bytes``; ``{ordinal}`` in one of
        them is each pod's own. Unless ``dataset_urls`` is among them, jobs may name all that the pods can read.
    :param environment: further variables for the pods, such as credentials of a store; REFILL_CA_FILE, to know them by.
    :param peer_url: ``(from_pod, to_pod, url) -> url``: by which address a pod reaches another one, for relays between
        them. None: by its own.
    """

    def __init__(
        self,
        num_pods: int,
        log_folder: Path,
        settings: Mapping[str, str | int | float] | None = None,
        environment: dict[str, str] | None = None,
        peer_url: Callable[[int, int, str], str] | None = None,
    ) -> None:
        settings = settings or {}
        self._scheme = "https" if "tls_cert" in settings else "http"
        self._peer_scheme = "https" if "peer_tls_cert" in settings else "http"
        self._ports: list[tuple[int, int]] = []
        """Of clients and of other pods, by ordinal: for life, as the names of a StatefulSet's pods."""
        self._claims = PortClaims()
        self._take_ports(num_pods)
        self.num_pods = num_pods
        self._log_folder = log_folder
        self._peer_url = peer_url or (lambda from_pod, to_pod, url: url)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("REFILL_")},
            **(environment or {}),
            "REFILL_HOST": "127.0.0.1",
            "REFILL_DATASET_URLS": "s3://,file:///",
            "REFILL_DRAIN_SECONDS": "0",  # nobody else sends requests here
            **_variables(settings),
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._start_all()
        return self

    def _start_all(self) -> None:
        try:
            self.processes = []
            for pod in range(self.num_pods):
                with interrupts_after():
                    self.processes.append(self._start(pod))
            for pod in range(self.num_pods):
                self._wait_until_ready(pod)
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._claims.give_back()

    def stop(self) -> None:
        """All of them, at once."""
        stop_processes(self.processes)

    def kill(self, pod: int) -> None:
        """End a pod at once, as a crash does."""
        self.processes[pod].send_signal(signal.SIGKILL)
        self.processes[pod].wait()

    def restart(self, pod: int, *, wait: bool = True, settings: Mapping[str, str | int | float] | None = None) -> None:
        """Start a pod again under the same addresses.

        :param wait: until it takes requests.
        :param settings: that it, and all pods started later, have now.
        """
        self._environment |= _variables(settings or {})
        with interrupts_after():
            self.processes[pod] = self._start(pod)
        if wait:
            self._wait_until_ready(pod)

    def pause(self, pod: int) -> None:
        """Let a pod stand still, as a machine does that is out of CPU or memory; nothing is closed or lost."""
        self.processes[pod].send_signal(signal.SIGSTOP)

    def resume(self, pod: int) -> None:
        self.processes[pod].send_signal(signal.SIGCONT)

    def log(self, pod: int) -> str:
        return (self._log_folder / f"pod-{pod}.log").read_text(errors="replace")

    @property
    def pod_urls(self) -> list[str]:
        """Where each pod serves clients."""
        return [f"{self._scheme}://127.0.0.1:{port}" for port, _ in self._ports[: self.num_pods]]

    @property
    def ports(self) -> list[int]:
        return [port for port, _ in self._ports[: self.num_pods]]

    @property
    def peer_ports(self) -> list[int]:
        return [peer_port for _, peer_port in self._ports[: self.num_pods]]

    def _take_ports(self, num_pods: int) -> None:
        ports = iter(self._claims.take(2 * max(0, num_pods - len(self._ports))))
        self._ports += zip(ports, ports, strict=True)

    def _start(self, pod: int) -> subprocess.Popen[bytes]:
        port, peer_port = self._ports[pod]
        urls = [f"{self._peer_scheme}://127.0.0.1:{peer}" for peer in self.peer_ports]
        peers = (url if to_pod == pod else self._peer_url(pod, to_pod, url) for to_pod, url in enumerate(urls))
        environment = {
            name: value.replace("{ordinal}", str(pod)) if name.startswith("REFILL_") else value
            for name, value in self._environment.items()
        }
        environment |= {
            "REFILL_ORDINAL": str(pod),
            "REFILL_POD_URLS": ",".join(self.pod_urls),
            "REFILL_PEER_URLS": ",".join(peers),
            "REFILL_PORT": str(port),
            "REFILL_PEER_PORT": str(peer_port),
        }
        with (self._log_folder / f"pod-{pod}.log").open("ab") as log:
            return start_process(["serve"], environment, log)

    def _wait_until_ready(self, pod: int) -> None:
        trusted: ssl.SSLContext | bool = False  # as costly to make as half a dozen requests
        if self._scheme == "https":
            trusted = Credentials(ca_file=self._environment.get(CA_FILE_VARIABLE)).ssl_context()
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self.processes[pod].poll() is not None:
                raise PodUnreachable(f"pod {pod} ended while starting: {self.log(pod).strip()[-500:]}")
            with contextlib.suppress(httpx.TransportError):
                ready_url = f"{self.pod_urls[pod]}/readyz"
                if httpx.get(ready_url, timeout=5, verify=trusted, trust_env=False).status_code == 200:
                    return
            time.sleep(0.05)
        raise PodUnreachable(f"pod {pod} was not ready after {_START_SECONDS} s: {self.log(pod).strip()[-500:]}")


def start_process(arguments: list[str], environment: dict[str, str], log: IO[bytes] | int) -> subprocess.Popen[bytes]:
    """``refill`` with these arguments.

    :param log: a file, or ``subprocess.PIPE``.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "refill_service.cli", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # Ctrl-C reaches this process alone, which then stops the pods in order.
        start_new_session=True,
    )


def stop_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """SIGTERM to all, SIGKILL to those that do not end. A second Ctrl-C must not leave any behind."""
    for process in processes:
        process.send_signal(STOP_SIGNAL)
        process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + _STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()


class PortClaims:
    """Ports of this machine that no other claim names, from :meth:`take` until :meth:`give_back`.

    A port that nobody listens on yet, or that nobody listens on while its pod is restarted, looks free to all others.
    So a claim holds the UDP port of the same number, which refill has no other use for: it ends with its process.
    """

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []

    def take(self, count: int) -> list[int]:
        """So many ports, chosen at random."""
        taken: list[int] = []
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            if len(taken) == count:
                return taken
            claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                claim.bind(("127.0.0.1", port))
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            except OSError:
                claim.close()
                continue
            self._claims.append(claim)
            taken.append(port)
        raise PodUnreachable(f"of ports {_PORTS.start} to {_PORTS.stop - 1} fewer than {count} are free")

    def give_back(self) -> None:
        while self._claims:
            self._claims.pop().close()


def _variables(settings: Mapping[str, str | int | float]) -> dict[str, str]:
    return {f"REFILL_{name.upper()}": str(value) for name, value in settings.items()}
