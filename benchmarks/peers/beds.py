"""Where do store, pods and trainer run? On hosts of a shaped network, or all on loopback."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from typing import IO, Protocol

__all__ = ["Bed", "loopback", "shaped"]


class Bed(Protocol):
    def address(self, host: str) -> str: ...

    def run(
        self, host: str, argv: Sequence[str], environment: dict[str, str], output: IO[bytes] | None
    ) -> subprocess.Popen[bytes]:
        """A process in a group of its own; ``output`` None: to the terminal."""
        ...


class _Loopback:
    def address(self, host: str) -> str:
        return "127.0.0.1"

    def run(
        self, host: str, argv: Sequence[str], environment: dict[str, str], output: IO[bytes] | None
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, env=environment, stdout=output, stderr=output, start_new_session=True)


@contextlib.contextmanager
def loopback() -> Iterator[Bed]:
    yield _Loopback()


@contextlib.contextmanager
def shaped(hosts: tuple[str, ...], delay_ms: float, store_mbit: int) -> Iterator[Bed]:
    raise NotImplementedError
