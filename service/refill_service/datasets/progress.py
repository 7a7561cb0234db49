"""How far along is a long command? A bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any, TextIO

_LINE_SECONDS = 5.0


def bytes_text(num_bytes: float) -> str:
    """``1.5 MB``: decimal units, as stores and networks are measured."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} PB"


class Progress:
    """A context manager; ``advance`` may be called from any thread."""

    def __init__(self, label: str, total_bytes: int | None = None, *, quiet: bool = False) -> None:
        self._label = label
        self._total = total_bytes
        self._done = 0
        self._quiet = quiet
        self._stream: TextIO = sys.stderr
        self._lock = threading.Lock()
        self._bar: Any = None
        self._task: Any = None
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        if not self._quiet and self._stream.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
            )
            self._task = self._bar.add_task(self._label, total=self._total)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num_bytes: int) -> None:
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.advance(self._task, num_bytes)
            return
        with self._lock:
            self._done += num_bytes
            now = time.monotonic()
            if now - self._last_line < _LINE_SECONDS:
                return
            self._last_line = now
            print(self._line(now), file=self._stream, flush=True)

    def _line(self, now: float) -> str:
        rate = self._done / max(now - self._started, 1e-9)
        line = f"{self._label}: {bytes_text(self._done)}"
        if self._total:
            left = max(self._total - self._done, 0) / max(rate, 1e-9)
            line += f" of {bytes_text(self._total)} ({100 * self._done / self._total:.0f} %)"
            return f"{line}, {bytes_text(rate)}/s, ETA {int(left) // 60}:{int(left) % 60:02}"
        return f"{line}, {bytes_text(rate)}/s"
