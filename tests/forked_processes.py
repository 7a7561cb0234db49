"""How do tests start hundreds of pods and ranks? Each is forked from a process that has imported what it needs, once.

Importing is most of the CPU of a process's whole life in a test. What runs after it is the command itself, in a process
of its own with its own environment; several tests and the demo start pods and ranks as users do.

Run as ``python forked_processes.py NAME COMMAND...`` it is, to a launcher that started it, the process that it asks
for: with its streams and its environment, and it ends as that one ends.
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
import tempfile
import threading
from pathlib import Path
from typing import IO

__all__ = ["PODS", "RANKS", "TESTS", "ForkedProcess", "python_of", "run_refill", "start", "start_pod", "start_rank"]

Modules = tuple[str, ...]
"""What a process has imported. One that imports more than :data:`RANKS`, and begins with them, is forked from that."""

PODS: Modules = (
    "refill_service.commands.serve",
    "refill_service.serving.serve",
    "refill_service.commands.datasets",
    "refill_service.object_store.file_store",
    "refill_service.object_store.file_store",
    # Imported by libraries when they are first needed.
    "anyio._backends._asyncio",
    "encodings.idna",
    "numpy.ma",
    "pydantic.v1",
    "uvicorn.lifespan.off",
)
RANKS: Modules = (
    *("refill", "refill.torch_dataset"),
    "torch._dynamo",  # imported with the first optimizer
    "torchdata.stateful_dataloader",
)
TESTS: Modules = (*RANKS, "imported_tests")
"""Of the processes that run tests: most of what each would do before its first one."""

MOST_BYTES = 150_000
"""Of a request, which is a process's environment: below what a socket's buffer takes in one piece."""
HELLO = b"forks"


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
    """The way to the process that forks, ``process_forker.py``. What it forks for this process ends with it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def ask(self, request: dict[str, object], *descriptors: int) -> int | None:
        said = json.dumps(request).encode()
        assert len(said) < MOST_BYTES
        with self._lock:
            socket.send_fds(self._socket, [said], descriptors)
            answer = self._socket.recv(100)
        assert answer, "the process that starts others has ended; what it says is above"
        found: int | None = json.loads(answer)
        return found

    def fork(
        self,
        arguments: list[str],
        environment: dict[str, str],
        streams: tuple[int, int, int],
        folder: str,
        **how: bool,
    ) -> ForkedProcess:
        """:param how: ``ends_whole``: as Python takes itself apart; ``stays``: though nobody is connected any more."""
        request = {"arguments": arguments, "environment": environment, "folder": folder} | how
        pid = self.ask(request, *streams)
        assert pid is not None
        return ForkedProcess(self, pid)


_FORKER = Path(__file__).with_name("process_forker.py")
_LONGEST_NAME = 100
_ATTEMPTS = 5
_COMMAND_SECONDS = 120
_starters: dict[tuple[int, Modules], _Starter] = {}


def start_pod(arguments: list[str], environment: dict[str, str], log: IO[bytes]) -> ForkedProcess:
    """``refill`` with these arguments."""
    return start(PODS, ["-m", "refill_service.cli", *arguments], environment, log)


def run_refill(arguments: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``refill`` with these arguments, to its end."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors, open(os.devnull) as nothing:
        streams = nothing.fileno(), output.fileno(), errors.fileno()
        command = ["-m", "refill_service.cli", *arguments]
        environment = dict(os.environ) if environment is None else environment
        process = _starter_of(PODS).fork(command, environment, streams, os.getcwd())
        try:
            returncode = process.wait(_COMMAND_SECONDS)
        finally:
            process.kill()
        for each in (output, errors):
            each.seek(0)
        return subprocess.CompletedProcess(arguments, returncode, output.read(), errors.read())


def start(
    modules: Modules, arguments: list[str], environment: dict[str, str], log: IO[bytes], cwd: Path | None = None
) -> ForkedProcess:
    """``python arguments``, with nothing to read.

    :param modules: that it imports.
    """
    with open(os.devnull) as nothing:
        streams = nothing.fileno(), log.fileno(), log.fileno()
        return _starter_of(modules).fork(arguments, environment, streams, str(cwd or os.getcwd()))


def start_rank(script: Path, *arguments: str, ends_whole: bool = False) -> tuple[ForkedProcess, IO[str], IO[str]]:
    """``python script arguments``: the process, its standard input and its standard output.

    :param ends_whole: its modules are taken apart at its end, as Python does it. Others only join their threads.
    """
    (read_by_it, to_it), (from_it, written_by_it) = os.pipe(), os.pipe()
    try:
        streams = read_by_it, written_by_it, 2
        process = _starter_of(RANKS).fork(
            [str(script), *arguments], dict(os.environ), streams, os.getcwd(), ends_whole=ends_whole
        )
    finally:
        os.close(read_by_it)
        os.close(written_by_it)
    return process, os.fdopen(to_it, "w"), os.fdopen(from_it)


def python_of(modules: Modules) -> list[str]:
    """What stands for ``python`` in a command that a launcher is given."""
    _starter_of(modules)  # it is there when the launcher asks
    return [sys.executable, "-S", "-E", __file__, _name_of(modules)]


def _starter_of(modules: Modules) -> _Starter:
    place = os.getpid(), modules  # a process that was forked has connections of its own
    if place not in _starters:
        _starters[place] = _Starter(_connected(modules))
    return _starters[place]


def _connected(modules: Modules) -> socket.socket:
    """To the process that has imported them: one for all processes that run the same tests."""
    name = _name_of(modules)
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(ConnectionError):
            return _connection_to(name)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(f"\0{name}")  # fails where another process was faster
            listening.listen(100)
            _start_forker(listening.fileno(), modules)
    raise RuntimeError(f"the process that imports {', '.join(modules)} ends at once; what it says is above")


def _start_forker(listening: int, modules: Modules) -> None:
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}  # looked at when torch is imported
    more = modules[len(RANKS) :]
    if more and modules[: len(RANKS)] == RANKS:
        with open(os.devnull, "w") as nothing:
            streams = listening, nothing.fileno(), 2
            _starter_of(RANKS).fork([str(_FORKER), "0", *more], environment, streams, os.getcwd(), stays=True)
        return
    subprocess.Popen(
        [sys.executable, str(_FORKER), str(listening), *modules],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[listening],
        start_new_session=True,
        env=environment,
    )


def _connection_to(name: str) -> socket.socket:
    """Raises ConnectionError when there is no such process, or it was about to end."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0{name}")
    if connection.recv(100) != HELLO:
        connection.close()
        raise ConnectionResetError(f"{name} has ended")
    return connection


def _name_of(modules: Modules) -> str:
    of_tests = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"process-{os.getpid()}"
    return f"refill-{of_tests}-{modules[-1]}"[:_LONGEST_NAME]


def _be(name: str, arguments: list[str]) -> None:
    process = _Starter(_connection_to(name)).fork(arguments, dict(os.environ), (0, 1, 2), os.getcwd())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: process.send_signal(number))
    ended = process.wait()
    if ended < 0:
        if -ended in (signal.SIGTERM, signal.SIGINT):
            signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    sys.exit(ended)


if __name__ == "__main__":
    _be(sys.argv[1], sys.argv[2:])
