"""What changes where an object comes to another process, and does a loader worker outlive the training process? Not by
more than a moment.

torch's workers look for it only while they wait for work. One that waits for a pod, or has handed over more than the
pipe to the training process has room for, would stay for ever. Its requests would say that the rank is still there.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any, ClassVar

from refill.pods.own_life import loader_worker

_LOOK_SECONDS = 1.0

_looks_in = 0
"""The process that looks after its parent."""


class PerProcess:
    """An object of which each process has its own: a copy, by pickle or by a fork, begins anew there."""

    OF_ONE_PROCESS: ClassVar[tuple[str, ...]]
    """Attributes that stay behind; :meth:`_begin_process` makes them."""
    _process: int

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in (*self.OF_ONE_PROCESS, "_process")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_process()

    def _own_process(self) -> None:
        if self._process != os.getpid():
            self._begin_process()

    def _begin_process(self) -> None:
        self._process = os.getpid()


def ends_with_its_parent() -> None:
    """Fact: this process asks for samples. If it is a loader worker, it ends as soon as the process is gone that has
    started it."""
    global _looks_in
    if _looks_in == os.getpid():
        return
    _looks_in = os.getpid()
    if loader_worker() is not None:
        threading.Thread(target=_look, args=(os.getppid(),), name="refill-orphan", daemon=True).start()


def _look(started_by: int) -> None:
    """:param started_by: the training process, or multiprocessing's fork server, which stays as long as this one."""
    pause, training = threading.Event(), multiprocessing.parent_process()
    while not pause.wait(_LOOK_SECONDS):
        # Of forked ones, those that came later keep the sign of life open that multiprocessing looks at.
        if os.getppid() != started_by or (training is not None and not training.is_alive()):
            os._exit(1)  # in order it might wait for the pipe that nobody reads
