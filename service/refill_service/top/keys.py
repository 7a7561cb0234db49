"""What has somebody at the terminal pressed? q to leave, arrows and pages to scroll. Nothing is followed by Enter."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from dataclasses import dataclass
from typing import Any

__all__ = ["Keys", "Pressed"]

_LINES = {b"\x1b[A": -1, b"\x1bOA": -1, b"k": -1, b"\x1b[B": 1, b"\x1bOB": 1, b"j": 1}
_PAGES = {b"\x1b[5~": -1, b"\x1b[6~": 1, b" ": 1}
_KEY = re.compile(rb"\x1b[\[O][0-9;]*[~A-Za-z]|.", re.DOTALL)
"""One key: what arrows and the like send, or one letter."""


@dataclass(frozen=True)
class Pressed:
    """How far to scroll, down where it is positive."""

    leave: bool = False
    lines: int = 0
    pages: int = 0


class Keys:
    """A context manager, which gives the terminal its settings back.

    :param watched: False: nobody is at a terminal, or its keys are another program's.
    """

    def __init__(self, watched: bool) -> None:
        self._watched = watched and sys.stdin is not None and sys.stdin.isatty()
        self._was: list[Any] = []

    def __enter__(self) -> Keys:
        if self._watched:
            self._was = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._was:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._was)

    def pressed(self, until: float) -> Pressed | None:
        """At once when there is something to do; None: nothing was pressed until then.

        :param until: a time of :func:`time.monotonic`.
        """
        while (rest := until - time.monotonic()) > 0:
            if not self._watched:
                time.sleep(rest)
            elif select.select([sys.stdin], [], [], rest)[0]:
                found = os.read(sys.stdin.fileno(), 64)
                self._watched = bool(found)  # the terminal is gone where nothing comes
                keys = _KEY.findall(found)
                if b"q" in keys or b"Q" in keys:
                    return Pressed(leave=True)
                lines, pages = (sum(of.get(key, 0) for key in keys) for of in (_LINES, _PAGES))
                if lines or pages:
                    return Pressed(lines=lines, pages=pages)
        return None
