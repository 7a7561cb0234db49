"""How do tests start hundreds of pods and ranks? Each is forked from a process that has imported what it needs, once.

Importing is most of the CPU of a process's whole life in a test. What runs after it is the command itself, in a process
of its own with its own environment; several tests and the demo start pods and ranks as users do.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

__all__ = ["ForkedProcess", "start_pod", "start_rank"]

_MOST_BYTES = 150_000
"""Of a request, which is a process's environment: below what a socket's buffer takes in one piece."""


class ForkedProcess:
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
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
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
    """The process that forks. It ends with this one, and takes along the processes that are left.

    :param modules: that it imports first.
    """

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with other:
            command = [sys.executable, __file__, str(other.fileno()), *modules]
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
        assert answer, "the process that starts others has ended; what it says is above"
        found: int | None = json.loads(answer)
        return found


_PODS = ("refill_service.commands.serve", "refill_service.serving.serve")
_RANKS = ("refill", "refill.torch_dataset", "torchdata.stateful_dataloader")
_starters: dict[tuple[int, tuple[str, ...]], _Starter] = {}


def start_pod(arguments: list[str], environment: dict[str, str], log: IO[bytes]) -> ForkedProcess:
    """``refill`` with these arguments."""
    with open(os.devnull) as nothing:
        streams = nothing.fileno(), log.fileno(), log.fileno()
        return _start(_PODS, ["-m", "refill_service.cli", *arguments], environment, streams)


def start_rank(script: Path, *arguments: str) -> tuple[ForkedProcess, IO[str], IO[str]]:
    """``python script arguments``: the process, its standard input and its standard output."""
    (read_by_it, to_it), (from_it, written_by_it) = os.pipe(), os.pipe()
    try:
        streams = read_by_it, written_by_it, 2
        process = _start(_RANKS, [str(script), *arguments], dict(os.environ), streams)
    finally:
        os.close(read_by_it)
        os.close(written_by_it)
    return process, os.fdopen(to_it, "w"), os.fdopen(from_it)


def _start(
    modules: tuple[str, ...], arguments: list[str], environment: dict[str, str], streams: tuple[int, int, int]
) -> ForkedProcess:
    place = os.getpid(), modules  # a process that was forked has starters of its own
    starter = _starters.get(place) or _starters.setdefault(place, _Starter(modules))
    request: dict[str, object] = {"arguments": arguments, "environment": environment, "folder": os.getcwd()}
    pid = starter.ask(request, *streams)
    assert pid is not None
    return ForkedProcess(starter, pid)


def _fork_when_asked(asked: socket.socket) -> list[str]:
    """Returns in each process, with its arguments."""
    children: set[int] = set()
    while True:
        said, streams, _, _ = socket.recv_fds(asked, _MOST_BYTES, 3)
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
        pid = os.fork()
        if pid == 0:
            break
        for each in streams:
            os.close(each)
        children.add(pid)
        asked.send(json.dumps(pid).encode())
    asked.close()
    os.setsid()
    os.chdir(request["folder"])
    for standard, each in enumerate(streams):
        os.dup2(each, standard)
    for each in streams:
        os.close(each)
    os.environ.clear()
    os.environ.update(request["environment"])
    arguments: list[str] = request["arguments"]
    return arguments


if __name__ == "__main__":
    _, _socket, *_modules = sys.argv
    for _module in _modules:
        importlib.import_module(_module)
    _command = _fork_when_asked(socket.socket(fileno=int(_socket)))
    if _command[0] == "-m":
        sys.argv = _command[1:]
        runpy.run_module(_command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = _command
        sys.path[0] = str(Path(_command[0]).parent)
        runpy.run_path(_command[0], run_name="__main__")
