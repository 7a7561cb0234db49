"""A process that imports modules, and then forks for whoever connects to it, until nobody is connected any more.

Run as ``python process_forker.py LISTENING_SOCKET MODULES...`` by :mod:`tests.forked_processes`. A request is a process
to be forked, with its three streams, answered by its number; or the number of one, answered by how it ended. Processes
end with the connection that asked for them, but for those that fork others themselves: they end as this one does.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

HELLO, MOST_BYTES = b"forks", 150_000


class _Forker:
    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._asked = selectors.DefaultSelector()
        self._asked.register(listening, selectors.EVENT_READ)
        self._children: dict[socket.socket, set[int]] = {}

    def next_request(self) -> dict[str, Any]:
        """Returns in each process that is forked, with what is asked of it."""
        while True:
            for key, _ in self._asked.select():
                if key.fileobj is self._listening:
                    self._welcome(self._listening.accept()[0])
                elif (request := self._forked_for(key.fileobj)) is not None:
                    return request

    def _welcome(self, connection: socket.socket) -> None:
        self._children[connection] = set()
        self._asked.register(connection, selectors.EVENT_READ)
        connection.send(HELLO)

    def _forked_for(self, connection: Any) -> dict[str, Any] | None:
        try:
            said, streams, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
        except ConnectionError:
            said, streams = b"", []
        if not said:
            self._gone(connection)
            return None
        request: dict[str, Any] = json.loads(said)
        if "ended" in request:
            connection.send(json.dumps(self._ended(connection, request["ended"])).encode())
            return None
        pid = os.fork()
        if pid == 0:
            self._become(request, streams)
            return request
        for each in streams:
            os.close(each)
        if not request.get("stays"):
            self._children[connection].add(pid)
        connection.send(json.dumps(pid).encode())
        return None

    def _ended(self, connection: socket.socket, child: int) -> int | None:
        pid, status = os.waitpid(child, os.WNOHANG)
        if not pid:
            return None
        self._children[connection].discard(pid)
        return os.waitstatus_to_exitcode(status)

    def _gone(self, connection: socket.socket) -> None:
        for pid in self._children.pop(connection):
            os.kill(pid, signal.SIGKILL)  # it is there until somebody has asked how it ended
            os.waitpid(pid, 0)
        self._asked.unregister(connection)
        connection.close()
        if not self._children:
            os._exit(0)

    def _become(self, request: dict[str, Any], streams: list[int]) -> None:
        self._asked.close()
        self._listening.close()
        for connection in self._children:
            connection.close()
        os.setsid()
        os.chdir(request["folder"])
        for standard, each in enumerate(streams):
            os.dup2(each, standard)
        for each in streams:
            os.close(each)
        os.environ.clear()
        os.environ.update(request["environment"])


def main() -> None:
    _, listening, *modules = sys.argv
    for module in modules:
        importlib.import_module(module)
    threads = [name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")]
    others = [name for name in threads[1:] if name != "jemalloc_bg_thd"]  # that one, pyarrow's, knows of forks
    assert not others, f"no forked process would have the threads that these imports begin: {modules}"
    # Else each process looks through all of it when it ends, and copies the pages: most of the CPU of a short life.
    gc.collect()
    gc.freeze()
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001
        each.atexit = False  # hundreds of torch's tables, in memory alone
    request = _Forker(socket.socket(fileno=int(listening))).next_request()
    try:
        _run(request["arguments"])
    except SystemExit as ended:
        if request.get("ends_whole") or not isinstance(ended.code, int | None):
            raise
        _end(ended.code or 0)
    if request["arguments"][0] == "-u":
        os._exit(0)  # pytest-xdist knows all; ranks that tests have left would look for pods that are gone, 10 s long
    if not request.get("ends_whole"):
        _end(0)


def _run(command: list[str]) -> None:
    if command[0] == "-u":  # as what starts processes of pytest-xdist says
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        command = command[1:]
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = [command[0], *command[2:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(command[1], sys.modules["__main__"].__dict__)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")


def _end(status: int) -> NoReturn:
    """What a program can see of its interpreter's end: threads are joined, and what asked for it is called. Then all
    modules would be taken apart, and torch's libraries unloaded: 0.2 s of CPU in each process that has it."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
