"""Which life of a rank does this process belong to, and does another one still live here?

A training process is a life, and its loader workers are of it: they are daemonic processes, forked or spawned, that use
a dataset object of their parent, or workers of a DataLoader that make one. Every other process that a dataset object is
copied to trains for itself, and in place of the one that it was copied from.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from refill.errors import RankHeld, RankTaken
from refill.protocol.rank_life import RankLife, host_for_life

_PROC = Path("/proc")
_STATE, _PARENT, _STARTED = 0, 1, 19
"""Fields of ``/proc/PROCESS/stat`` after the name, counted from 0."""
_ENDED_STATES = "ZX"
"""A zombie has ended, and nobody has asked how."""

_known: dict[int, RankLife] = {}
"""By process: of this one, and of its parent, who may have ended when it is asked for."""


def own_life(made_in: int) -> RankLife:
    """The life that this process asks for.

    :param made_in: the process in which the dataset object was made.
    """
    here = os.getpid()
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return _life_of(here)
    is_helper = made_in != here and multiprocessing.current_process().daemon
    return _life_of(parent.pid if is_helper or loader_worker() is not None else here)


def is_of_this_process(life: RankLife) -> bool:
    """Whether this is the training process, and no loader worker of it."""
    return life.process == os.getpid()


def has_ended(life: RankLife) -> bool:
    """Whether a process is known to have ended. Only those of this machine, and of this container on it, are known."""
    if not life.place or life.place != _place():
        return False
    try:
        os.kill(life.process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # of another user
    fields = _stat(life.process)
    if fields is None:
        return False
    return fields[_STATE] in _ENDED_STATES or int(fields[_STARTED]) != life.started


def leaves_the_rank_to(life: RankLife, made_in: int) -> bool:
    """Whether a life is the process that started this one to train in its place: it may have looked at a batch before.

    :param made_in: as in :func:`own_life`.
    """
    here, parent = os.getpid(), multiprocessing.parent_process()
    if not life.place or life.place != _place() or life in (_life_of(here), own_life(made_in)):
        return False
    if life.process != made_in and (parent is None or life.process != parent.pid):
        return False
    fields = _stat(life.process)
    return fields is not None and int(fields[_STARTED]) == life.started and life.process in _ancestors(here)


def is_free(error: RankTaken, holder: RankLife, made_in: int) -> bool:
    """Whether a rank that a pod refuses to this process is its own all the same: who is it has ended, or leaves it to
    this one. Who had left it to another one that it started has it again when that one has ended, but for workers that
    have outlived it.

    :param made_in: as in :func:`own_life`.
    """
    if isinstance(error, RankHeld):
        return has_ended(holder) or leaves_the_rank_to(holder, made_in)
    return has_ended(holder) and not has_ended(own_life(made_in))


def _ancestors(process: int) -> Iterator[int]:
    """Those above a process; its parent first, which may be multiprocessing's fork server."""
    while (fields := _stat(process)) is not None and (process := int(fields[_PARENT])) > 0:
        yield process


def loader_worker() -> int | None:
    """Which worker of a DataLoader this process is; None: it is none. One that is has torch, which is not imported for
    this."""
    get_worker_info = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", None)
    info = None if get_worker_info is None else get_worker_info()
    return None if info is None else int(info.id)


def _life_of(process: int) -> RankLife:
    life = _known.get(process)
    if life is None:
        fields = _stat(process)
        started = 0 if fields is None else int(fields[_STARTED])
        life = _known[process] = RankLife(host_for_life(socket.gethostname()), process, started, _place())
    return life


def _stat(process: int) -> list[str] | None:
    try:
        stat = (_PROC / str(process) / "stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()  # the name may hold anything


def _place() -> str:
    """The same for processes that can see each other; containers of one machine number theirs apart."""
    global _found_place
    if _found_place is None:
        try:
            boot = (_PROC / "sys/kernel/random/boot_id").read_text()
            numbers = os.readlink(_PROC / "self/ns/pid")
            _found_place = hashlib.blake2b(f"{boot} {numbers}".encode(), digest_size=6).hexdigest()
        except OSError:
            _found_place = ""
    return _found_place


_found_place: str | None = None


def _in_child() -> None:
    """Numbers of processes further up may be used again."""
    parent = os.getppid()
    for process in [known for known in _known if known != parent]:
        del _known[process]


os.register_at_fork(after_in_child=_in_child)
