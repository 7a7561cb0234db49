"""How do tests start hundreds of pods? Each is forked from a process that has imported what a pod imports, once.

Importing is most of the CPU of a pod's whole life in a test. What runs after it is ``refill serve`` itself, in
a process of its own with its own environment; several tests and the demo start it as users do.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from typing import IO

__all__ = ["ForkedPod", "start"]

_MOST_BYTES = 150_000
"""Of a request, which is a pod's environment: below what a socket's buffer takes in one piece."""


class ForkedPod:
    """What is used of subprocess.Popen. The process is a child of the one that forked it, which knows how it ended."""

    def __init__(self, starter: _Starter, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._starter = starter
        self._ends = os.pidfd_open(pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._starter.ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not self._ended_within(timeout):
            raise subprocess.TimeoutExpired(f"pod {self.pid}", timeout or 0)
        found = self.poll()
        assert found is not None
        return found

    def _ended_within(self, seconds: float | None) -> bool:
        waiting = select.poll()  # select() knows no descriptors from 1,024 on
        waiting.register(self._ends, select.POLLIN)
        return bool(waiting.poll(None if seconds is None else 1000 * seconds))

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._ends, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._ends)


class _Starter:
    """The process that forks. It ends with this one, and takes along the pods that are left."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with other:
            command = [sys.executable, __file__, str(other.fileno())]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )

    def ask(self, request: dict[str, object], *descriptors: int) -> int | None:
        said = json.dumps(request).encode()
        assert len(said) < _MOST_BYTES
        with self._lock:
            socket.send_fds(self._socket, [said], descriptors)
            answer = self._socket.recv(100)
        assert answer, "the process that starts pods has ended; what it says is above"
        found: int | None = json.loads(answer)
        return found


_starters: dict[int, _Starter] = {}


def start(arguments: list[str], environment: dict[str, str], log: IO[bytes]) -> ForkedPod:
    """``refill`` with these arguments; a process that was forked has a starter of its own."""
    starter = _starters.get(os.getpid()) or _starters.setdefault(os.getpid(), _Starter())
    request: dict[str, object] = {"arguments": arguments, "environment": environment, "folder": os.getcwd()}
    pid = starter.ask(request, log.fileno())
    assert pid is not None
    return ForkedPod(starter, pid)


def _fork_when_asked(asked: socket.socket) -> list[str]:
    """Returns in each pod, with its arguments."""
    children: set[int] = set()
    while True:
        said, descriptors, _, _ = socket.recv_fds(asked, _MOST_BYTES, 1)
        if not said:
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os._exit(0)
        request = json.loads(said)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            children.discard(pid)
            asked.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        (log,) = descriptors
        pid = os.fork()
        if pid == 0:
            break
        os.close(log)
        children.add(pid)
        asked.send(json.dumps(pid).encode())
    asked.close()
    os.setsid()
    os.chdir(request["folder"])
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["environment"])
    arguments: list[str] = request["arguments"]
    return arguments


if __name__ == "__main__":
    import refill_service.commands.serve
    import refill_service.serving.serve  # noqa: F401
    from refill_service.cli import run

    sys.argv = ["refill", *_fork_when_asked(socket.socket(fileno=int(sys.argv[1])))]
    run()
