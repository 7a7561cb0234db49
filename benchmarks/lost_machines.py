"""What happens to a network when a pod's machine goes? Pods in a network of their own, whose addresses can fall silent.

Runs as root in a mount and a network namespace of its own (:func:`enter`), so that nothing of it is left behind. Ranks
run there; the pods behind a pair of virtual interfaces, each at an address of its own, by names of ``/etc/hosts``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

__all__ = ["PORT", "LostMachines", "enter"]

PORT = 8000
_PEER_PORT = 8001
_NOBODY = "02:00:00:00:00:99"
"""A machine that does not exist: what is sent there is dropped, and nobody says so."""
_INSIDE = "REFILL_LOST_MACHINES"
_START_SECONDS = 60


def enter() -> None:
    """Go on with the same program in namespaces of its own. Raises OSError where that is not allowed."""
    if os.environ.get(_INSIDE):
        return
    namespaces = ["unshare", "--mount", "--net"]
    if subprocess.run([*namespaces, "true"], capture_output=True).returncode != 0:
        raise PermissionError("no network namespaces here: this needs root")
    own_hosts = "file=$(mktemp) && mount --bind $file /etc/hosts && rm $file"
    os.environ[_INSIDE] = "1"
    sys.stdout.flush()
    os.execvp("unshare", [*namespaces, "sh", "-c", f'{own_hosts} && exec "$@"', "sh", *sys.orig_argv])


class LostMachines:
    """``num_pods`` pods, each on a machine of its own as far as the network is concerned. A context manager.

    :param settings: of every pod, by their names.
    """

    def __init__(self, num_pods: int, log_folder: Path, settings: dict[str, Any]) -> None:
        self._num_pods = num_pods
        self._folder = log_folder
        self._settings = settings
        self._addresses: dict[int, str] = {}
        self._next_address = 2
        self._pods: dict[int, subprocess.Popen[bytes]] = {}
        self._holder: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LostMachines:
        try:
            self._connect()
            for pod in range(self._num_pods):
                self.begin(pod)
            for pod in range(self._num_pods):
                self.wait_until_ready(pod)
        except BaseException:
            self._stop()
            raise
        return self

    def _connect(self) -> None:
        # Its network namespace is the pods'.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "ranks", "type", "veth", "peer", "name", "pods")
        _run("ip", "link", "set", "pods", "netns", str(self._holder.pid))
        _run("ip", "addr", "add", "10.77.0.1/24", "dev", "ranks")
        _run("ip", "link", "set", "ranks", "up")
        for device in ("lo", "pods"):
            self._run("ip", "link", "set", device, "up")

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        for process in (*self._pods.values(), self._holder):
            if process is not None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
        subprocess.run(["ip", "link", "del", "ranks"], capture_output=True)

    def url(self, pod: int) -> str:
        return f"http://refill-{pod}.refill:{PORT}"

    def begin(self, pod: int, *, elsewhere: bool = True) -> None:
        """Start a pod, at an address that no pod has had unless it is to have its own again."""
        if elsewhere:
            self._addresses[pod] = f"10.77.0.{self._next_address}"
            self._next_address += 1
            self._run("ip", "addr", "add", f"{self._addresses[pod]}/24", "dev", "pods")
        names = "".join(f"{address} refill-{each}.refill\n" for each, address in self._addresses.items())
        Path("/etc/hosts").write_text("127.0.0.1 localhost\n" + names)
        settings = {
            "host": self._addresses[pod],
            "port": PORT,
            "peer_port": _PEER_PORT,
            "ordinal": pod,
            "replicas": self._num_pods,
            "pod_urls": f"http://refill-{{ordinal}}.refill:{PORT}",
            "peer_urls": f"http://refill-{{ordinal}}.refill:{_PEER_PORT}",
            "drain_seconds": 0,
            **self._settings,
        }
        variables = {f"REFILL_{name.upper()}": str(value) for name, value in settings.items()}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("REFILL_")}
        with (self._folder / f"pod-{pod}.log").open("ab") as log:
            self._pods[pod] = subprocess.Popen(
                self._inside(sys.executable, "-m", "refill_service.cli", "serve"),
                env=kept | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_until_ready(self, pod: int) -> None:
        url = f"http://{self._addresses[pod]}:{PORT}/readyz"
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            try:
                if httpx.get(url, timeout=1).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        raise RuntimeError(f"pod {pod} did not start:\n{self.log(pod)[-2000:]}")

    def end(self, pod: int, how: signal.Signals = signal.SIGTERM) -> None:
        """End a pod's process, while its machine lives on."""
        self._pods[pod].send_signal(how)
        self._pods[pod].wait()

    def signal(self, pod: int, what: signal.Signals) -> None:
        self._pods[pod].send_signal(what)

    def fall_silent(self, pod: int) -> None:
        """Whatever is sent to the pod's address from now on is dropped, and it can't send anything either."""
        address = self._addresses[pod]
        self._run("ip", "addr", "del", f"{address}/24", "dev", "pods")
        _run("ip", "neigh", "replace", address, "lladdr", _NOBODY, "dev", "ranks", "nud", "permanent")
        self._run("ip", "neigh", "replace", address, "lladdr", _NOBODY, "dev", "pods", "nud", "permanent")

    def be_heard(self, pod: int) -> None:
        """The pod's address is there again, as it was."""
        address = self._addresses[pod]
        _run("ip", "neigh", "del", address, "dev", "ranks")
        self._run("ip", "neigh", "del", address, "dev", "pods")
        self._run("ip", "addr", "add", f"{address}/24", "dev", "pods")

    def unread_bytes(self, pod: int) -> int:
        """What has come to a pod's client port over the network that it has not read."""
        assert self._holder is not None
        found = 0
        for line in Path(f"/proc/{self._holder.pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            local, port = fields[1].split(":")
            if int(port, 16) == PORT and bytes.fromhex(local)[::-1] == _packed(self._addresses[pod]):
                found += int(fields[4].split(":")[1], 16) if fields[3] == "01" else 0
        return found

    def log(self, pod: int) -> str:
        return (self._folder / f"pod-{pod}.log").read_text()

    def _inside(self, *command: str) -> list[str]:
        assert self._holder is not None
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", *command]

    def _run(self, *command: str) -> None:
        _run(*self._inside(*command))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _packed(address: str) -> bytes:
    return bytes(int(part) for part in address.split("."))
