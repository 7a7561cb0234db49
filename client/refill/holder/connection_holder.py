"""How do all ranks of a machine, and their loader workers, share a few connections to each pod? This process has them.

    python -m refill.holder.connection_holder SOCKET

It is started by who needs it first, and ends when nobody has been connected to it for a few seconds. It decides
nothing: a request goes on to its pod with the token that it came with, and the answer goes back as it is. Nothing is
lost with it: who waited asks again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import resource
import select
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from refill.errors import RefillError
from refill.holder.held_pool import HeardPods, HeldPool
from refill.holder.held_request import Asker, HolderAsked, PoolKey, parsed
from refill.pods.holder_door import is_of_this_user

log = logging.getLogger(__name__)

_LINGER_SECONDS = 5.0
_JOB_LINGERS_SECONDS = 1.0
"""After its last asker has gone, pods see its connections close, by which they know that nobody asks any more."""
_LOOK_SECONDS = 0.05
_LOOKS_FOR_SECONDS = 1.0
_MOST_THREADS = 4096
_BACKLOG = 4096
_HERE = b"HTTP/1.1 204 here\r\n\r\n"


class ConnectionHolder:
    """Holds a machine's connections to pods, and asks pods for the processes that come to its socket.

    :param listening: a Unix socket.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._events = select.epoll()
        self._events.register(listening, select.EPOLLIN)
        self._askers: dict[int, Asker] = {}
        """By the number of their sockets."""
        self._pools: dict[PoolKey, HeldPool] = {}
        self._heard = HeardPods()
        self._asked_at: dict[str, float] = {}
        """By job, when somebody was connected for it last."""
        self._in_use_at = time.monotonic()
        self._looked_at = self._looked_for_at = 0.0
        self._path = Path(listening.getsockname())
        self._made = _file(self._path)
        self._is_found = True
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "refill-held")

    def run(self) -> None:
        """Returns when nobody has been connected for a while, or nobody can be: its socket was deleted."""
        while time.monotonic() < self._in_use_at + _LINGER_SECONDS and self._can_be_found():
            for number, _ in self._events.poll(_LOOK_SECONDS if self._pools else 1.0):
                if number == self._listening.fileno():
                    self._accept()
                elif (asker := self._askers.get(number)) is not None:
                    self._take(asker)
            self._look(time.monotonic())

    def _can_be_found(self) -> bool:
        now = time.monotonic()
        if now >= self._looked_for_at + _LOOKS_FOR_SECONDS:
            self._looked_for_at = now
            self._is_found = _file(self._path) == self._made
        return self._is_found

    def _accept(self) -> None:
        try:
            sock = self._listening.accept()[0]
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # it has as many open files as it may: who waits goes alone
            log.warning("no more processes can connect: %s", error)
            time.sleep(_LOOK_SECONDS)
            return
        if not is_of_this_user(sock):
            sock.close()
            return
        asker = Asker(sock)
        self._askers[asker.number] = asker
        self._events.register(asker.number, select.EPOLLIN | select.EPOLLONESHOT)

    def _take(self, asker: Asker) -> None:
        """Something of a request has come."""
        if not asker.read():
            self._leave(asker)
            return
        try:
            request = parsed(asker)
            pool = None if request is None else self._pool(request.key)
        except HolderAsked:
            with contextlib.suppress(OSError):
                asker.sock.send(_HERE, socket.MSG_DONTWAIT)
            self._leave(asker)
            return
        except (ValueError, KeyError, TypeError, RefillError) as error:
            log.warning("a request is not understood: %s", error)
            self._leave(asker)
            return
        if request is None or pool is None:
            self._listen(asker)
        else:
            pool.put(request)

    def _pool(self, key: PoolKey) -> HeldPool:
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = HeldPool(key, self._heard, self._threads.submit, self._done)
        self._asked_at[key.job] = time.monotonic()
        return pool

    def _done(self, asker: Asker, may_ask_again: bool) -> None:
        """Fact, of any thread: a request of an asker is answered."""
        if may_ask_again:
            self._listen(asker)
        else:
            self._leave(asker)

    def _listen(self, asker: Asker) -> None:
        self._events.modify(asker.number, select.EPOLLIN | select.EPOLLONESHOT)

    def _leave(self, asker: Asker) -> None:
        self._askers.pop(asker.number, None)
        asker.sock.close()

    def _look(self, now: float) -> None:
        if now < self._looked_at + _LOOK_SECONDS:
            return
        self._looked_at = now
        askers = list(self._askers.values())
        if askers:
            self._in_use_at = now
        self._asked_at |= {asker.job: now for asker in askers if asker.job is not None}
        for key, pool in list(self._pools.items()):
            if now > self._asked_at[key.job] + _JOB_LINGERS_SECONDS:
                self._pools.pop(key).close()
            else:
                pool.look(now)


def main(path: Path) -> int:
    """Listens at ``path``, and goes on in a process of its own: this one ends when others can connect."""
    with path.with_suffix(".held").open("ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0  # there is one
        path.unlink(missing_ok=True)  # of one that was killed
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            listening.bind(str(path))
            listening.listen(_BACKLOG)
            listening.setblocking(False)
            if os.fork():
                return 0
            _be_apart(path)
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            made = _file(path)
            try:
                ConnectionHolder(listening).run()
            except BaseException:
                log.exception("it ends")
            finally:
                if _file(path) == made:
                    with contextlib.suppress(OSError):
                        path.unlink()
                # Who connects now finds nobody, and starts another one; who did just before is cut off, and asks again.
                os._exit(0)
    return 0


def _file(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _be_apart(path: Path) -> None:
    """Nobody waits for what the process says any more; it is kept in a file."""
    try:
        log_file = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError:  # no room
        log_file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log_file, 1)
    os.dup2(log_file, 2)
    os.close(log_file)
    logging.basicConfig(format="%(asctime)s %(message)s")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
