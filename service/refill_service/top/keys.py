"""Has somebody at the terminal asked to leave, by the key q? Nothing has to be followed by Enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from typing import Any

__all__ = ["Keys"]


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

    def ask_to_leave(self, within_seconds: float) -> bool:
        """Whether they do within this time; returns at once if so."""
        deadline = time.monotonic() + within_seconds
        while (rest := deadline - time.monotonic()) > 0:
            if not self._watched:
                time.sleep(rest)
            elif select.select([sys.stdin], [], [], rest)[0]:
                pressed = os.read(sys.stdin.fileno(), 64)
                if b"q" in pressed.lower():
                    return True
                self._watched = bool(pressed)  # the terminal is gone where nothing comes
        return False
