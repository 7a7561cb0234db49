"""How do pods learn that a training process has ended in order? It says goodbye, as the last thing it does.

Pods give its job's memory to others then, and nothing is lost by that: who asks for the job again finds it as it was.
A process that is killed says nothing; pods see its connections close. A notebook that goes on says goodbye for what it
has let go of: a job that was registered, and of which nobody has asked for anything, has no connections.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from refill.pods.credentials import Credentials
from refill.pods.pod_channel import PodChannel, Wait
from refill.protocol.rank_life import RankLife

_SECONDS = 1.0
"""For one pod to answer. A process that ends stays for that long, and once more, at most."""
_MOST = 64
"""A notebook may run many jobs; those of its first are known by their connections."""
_AFTER_LOADER_WORKERS = -50


class Goodbye(NamedTuple):
    """What is to be said. It holds no connection: those tell pods, as they are closed, that nobody asks any more."""

    pod: str
    """The home of the rank."""
    job: str
    rank: int
    life: RankLife
    credentials: Credentials

    def say(self) -> None:
        path = f"/v1/jobs/{quote(self.job, safe='')}/ranks/{self.rank}/lease?{urlencode({'life': self.life.encode()})}"
        PodChannel(self.credentials, _SECONDS).call("DELETE", self.pod, path, Wait(_SECONDS))


_goodbyes: dict[tuple[str, int], Goodbye] = {}
"""By job and rank, the newest last."""
_process = 0
"""That says them when it ends."""


_when_garbage: weakref.WeakKeyDictionary[object, weakref.finalize[Any, Any]] = weakref.WeakKeyDictionary()
_saying: set[threading.Thread] = set()


def says_goodbye(goodbye: Goodbye, whose: object, has_asked: Callable[[], bool]) -> None:
    """Have it said when this process ends; in place of what was to be said for this rank before.

    :param whose: it is said, too, when this is garbage, unless ``has_asked``: then pods see its connections close.
    """
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        _goodbyes.clear()  # a forked process says nothing for the one that forked it
        _saying.clear()
        Finalize(None, _say_all, args=(_process,), exitpriority=_AFTER_LOADER_WORKERS)
    _goodbyes.pop((goodbye.job, goodbye.rank), None)
    _goodbyes[goodbye.job, goodbye.rank] = goodbye
    while len(_goodbyes) > _MOST:
        del _goodbyes[next(iter(_goodbyes))]
    if (before := _when_garbage.get(whose)) is not None:
        before.detach()
    _when_garbage[whose] = weakref.finalize(whose, _is_garbage, _process, goodbye, has_asked)
    _when_garbage[whose].atexit = False  # it is said then anyway


def are_said() -> None:
    """Wait for those that are being said, before a job is registered: it may need their jobs' memory."""
    for thread in list(_saying):
        thread.join()
        _saying.discard(thread)


def _is_garbage(process: int, goodbye: Goodbye, has_asked: Callable[[], bool]) -> None:
    """In a thread: whoever lets go of something has other work, and may hold locks."""
    key = goodbye.job, goodbye.rank
    if process != os.getpid() or _goodbyes.get(key) is not goodbye or has_asked():
        return
    del _goodbyes[key]

    def say() -> None:
        with contextlib.suppress(Exception):  # as below
            goodbye.say()

    thread = threading.Thread(target=say, name="refill-goodbye", daemon=True)
    with contextlib.suppress(RuntimeError):  # the process ends
        thread.start()
        _saying.add(thread)


def _say_all(process: int) -> None:
    if process != os.getpid():
        return
    ends, away = time.monotonic() + _SECONDS, set[str]()
    for thread in list(_saying):  # of what has become garbage as this process ends, too
        thread.join(max(0.0, ends - time.monotonic()))
    for goodbye in reversed(list(_goodbyes.values())):
        if goodbye.pod not in away and time.monotonic() < ends:
            try:
                goodbye.say()
            except Exception:  # whatever it is: a process that ends has nobody to tell
                away.add(goodbye.pod)
