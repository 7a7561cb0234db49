"""Which process of this machine holds the connections to pods, and how does another one reach it?

It listens on a Unix socket in a folder that is this user's alone, and both sides look whose process the other one is.
Whoever finds no holder starts one. Who can't have one goes on with connections of its own. Containers that share no
folder for temporary files, or no network, have a holder each.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import select
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from refill.errors import InvalidInput
from refill.pods.credentials import HOLDER_VARIABLE, Credentials
from refill.pods.pod_link import PodLink

log = logging.getLogger(__name__)

ABOVE_RANKS = 256
"""With 8 loader workers each, so many ranks have 2,048 connections to a pod, half of what it takes by default. Fewer
ranks are faster with their own: the holder passes on every byte (docs/CLIENT.md)."""
HELD_HEADER = "Refill-Held"
"""Of a request to the holder, JSON: which ``pod`` it is for, of which ``job``, by which ``ca_file``, in which ``lane``,
with ``connect_seconds``, ``seconds`` that the pod may be silent for, and ``silent_seconds`` while TLS is begun."""
SAID_HEADER = "Refill-Held-Said"
"""Of an answer: the holder says so, and no pod."""
DATA_LANE, QUICK_LANE, ALIVE_LANE = "data", "quick", "alive"
"""Requests that may take their time; those that don't, and wait for none of them; and for a sign of life."""
HOLDER_LANE = "holder"
"""Whether the holder itself answers; no pod is asked."""

_VERSION = 1
"""Of what asker and holder say to each other."""
_START_SECONDS = 20.0
_LOOK_SECONDS = 0.05
_CONNECT_SECONDS = 2.0
_ALONE_SECONDS, _LONGEST_ALONE_SECONDS = 30.0, 960.0
"""After a holder could not be had, or did not work, for so long none is asked; each further time for twice as long."""
_ANSWERS_SECONDS = 2.0
"""In which a holder says that it is there, however busy the machine is."""
_AGAIN_SECONDS = 0.25
"""The same for one that is tried again, while a batch waits."""
_SAYS_SECONDS = 1.0
"""After the time that a pod has, the holder has so long to say that nothing came of it."""
_LOOK_AGAIN_SECONDS = 0.5
_SENDS_SECONDS = 10.0
"""In which a holder, which reads whatever its pods do, has taken a request."""
_CREDENTIALS = struct.Struct("3i")
_TRUSTED = "SSL_CERT_FILE", "SSL_CERT_DIR"
"""Whom a process trusts that names no file: its holder has the environment of who started it."""
_SAYS_NOTHING = "it stands still"
_ARE_YOU_THERE = f'GET / HTTP/1.1\r\n{HELD_HEADER}: {{"lane": "{HOLDER_LANE}"}}\r\n\r\n'.encode()


def is_wanted(num_ranks: int) -> bool:
    """By REFILL_CONNECTION_HOLDER, else by the number of a job's ranks. Raises :class:`InvalidInput`."""
    said = os.environ.get(HOLDER_VARIABLE, "").strip().lower() or "auto"
    if said not in ("auto", "on", "off"):
        raise InvalidInput(f"{HOLDER_VARIABLE} must be auto, on or off, got {said!r}")
    return hasattr(socket, "SO_PEERCRED") and (said == "on" or (said == "auto" and num_ranks > ABOVE_RANKS))


def is_of_this_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1]) == os.geteuid()


class HolderDoor:
    """Reaches the process that holds the connections of this machine, for one other process."""

    def __init__(self) -> None:
        self.alone_until = 0.0
        self.alone_seconds = _ALONE_SECONDS
        self.is_doubted = False
        """Whether it did not work before."""
        self._answered_at = float("-inf")
        self.has_warned = False

    @property
    def is_open(self) -> bool:
        """Whether a holder is asked at all."""
        return time.monotonic() >= self.alone_until

    def connect(self) -> socket.socket | None:
        """A connection to the holder, which is started if there is none; None: go alone."""
        if not self.is_open:
            return None
        try:
            path = _folder() / f"{_name()}.sock"
            found = _connected(path) or _started(path)
        except (OSError, subprocess.SubprocessError) as error:
            self.go_alone(str(error))
            return None
        if self.is_doubted:
            if not self._answers(_AGAIN_SECONDS):
                found.close()
                self.go_alone(_SAYS_NOTHING)
                return None
            self.is_doubted, self.alone_seconds = False, _ALONE_SECONDS
        return found

    def look(self) -> None:
        """Called while nothing comes of the holder: pods may be silent, and it may not. Raises ConnectionResetError
        when it is, after which this process goes alone."""
        if self.is_open:
            if time.monotonic() < self._answered_at + _ANSWERS_SECONDS or self._answers(_ANSWERS_SECONDS):
                return
            self.go_alone(_SAYS_NOTHING)
        raise ConnectionResetError(_SAYS_NOTHING)

    def _answers(self, seconds: float) -> bool:
        """Over a connection of its own. True, too, for one that has ended: whoever waits for it hears of that."""
        try:
            sock = _connected(_folder() / f"{_name()}.sock")
            if sock is None:
                return True
            with sock:
                sock.settimeout(seconds)
                sock.sendall(_ARE_YOU_THERE)
                while sock.recv(1024):  # until it hangs up
                    self._answered_at = time.monotonic()
        except ConnectionError:
            return True
        except OSError:  # TimeoutError, or so many wait for it that one more finds no room
            return False
        return True

    def go_alone(self, why: str) -> None:
        """Fact: the holder can't be had, or does not work."""
        self.is_doubted = True
        self.alone_until = time.monotonic() + self.alone_seconds
        self.alone_seconds = min(2 * self.alone_seconds, _LONGEST_ALONE_SECONDS)
        if not self.has_warned:
            self.has_warned = True
            log.warning("this process has connections to pods of its own: there is no connection holder: %s", why)


door = HolderDoor()


class HolderLink(PodLink):
    """A connection to the holder, for requests to one pod.

    :param sock: of :meth:`HolderDoor.connect`.
    :param job: whose connections it is to use; those of one job are used for no other.
    """

    is_held = True

    def __init__(
        self, url: str, credentials: Credentials, connect_timeout_seconds: float, sock: socket.socket, job: str
    ) -> None:
        super().__init__(url, credentials, connect_timeout_seconds)
        self._about = {
            "pod": url,
            "job": job,
            "ca_file": None if credentials.ca_file is None else os.path.abspath(credentials.ca_file),
            "connect_seconds": connect_timeout_seconds,
        }
        self.lane = DATA_LANE
        """Of the next request."""
        self.silent_seconds: float | None = None
        """Of the next request, as that of :class:`PodChannel`."""
        self.sock = sock
        self.most_seconds = 0.0
        """That the holder may take to say what became of the last request."""

    def connect(self, still_connects: Callable[[], None] | None = None) -> None:
        raise ConnectionResetError("the holder has closed its connection")

    def send_request(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        seconds: float,
        still_connects: Callable[[], None] | None = None,
    ) -> None:
        about = json.dumps(self._about | {"lane": self.lane, "seconds": seconds, "silent_seconds": self.silent_seconds})
        # A pod's name takes as long as its machine at most.
        self.most_seconds = 2 * self._connect_timeout_seconds + seconds + _SAYS_SECONDS
        super().send_request(method, path, body, headers | {HELD_HEADER: about}, _SENDS_SECONDS)
        self.timeout = seconds

    def awaits_more(self, ends: float) -> None:
        """The rest of an answer comes of the holder at once, if it comes of the pod."""
        coming = select.poll()
        coming.register(self.sock, select.POLLIN)
        while not coming.poll(1000 * _LOOK_AGAIN_SECONDS):
            door.look()
            if time.monotonic() >= ends + _SAYS_SECONDS:
                raise TimeoutError


def _folder() -> Path:
    """Raises OSError for one that others may write to, or listen in."""
    folder = Path(tempfile.gettempdir()) / f"refill-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that only this user may enter")
    return folder


def _name() -> str:
    """The same for processes to which a pod's name leads to one address, and a certificate's file is one file."""
    spaces = [os.readlink(f"/proc/self/ns/{each}") for each in ("net", "mnt", "user")]
    spaces += [os.environ.get(each, "") for each in _TRUSTED]
    return f"holder-{_VERSION}-{hashlib.blake2b(' '.join(spaces).encode(), digest_size=6).hexdigest()}"


def _connected(path: Path) -> socket.socket | None:
    """None where nobody listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_CONNECT_SECONDS)
        sock.connect(str(path))
        if not is_of_this_user(sock):
            raise PermissionError(f"{path} is another user's")
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock


def _started(path: Path) -> socket.socket:
    """One process starts it, the others wait for that."""
    ends = time.monotonic() + _START_SECONDS
    while True:
        with _locked(path.with_suffix(".start")) as is_first:
            if (found := _connected(path)) is not None:
                return found
            if is_first:
                _start(path)
                if (found := _connected(path)) is not None:
                    return found
        if time.monotonic() >= ends:
            raise TimeoutError(f"nobody listens at {path} after {_START_SECONDS:g} s")
        time.sleep(_LOOK_SECONDS)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether nobody else had it."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            try:
                yield True
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open, too


def _start(path: Path) -> None:
    """Returns when it listens. It has no setting and no token of this process: requests bring them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REFILL_")}
    found_in = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [found_in, environment.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "refill.holder.connection_holder", str(path)],
        env=environment,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        timeout=_START_SECONDS,
        check=False,
    )
    if done.returncode:
        raise OSError(f"it did not start: {done.stderr.decode(errors='replace').strip()[-300:]}")
