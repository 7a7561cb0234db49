"""Where do store, pods and trainer run? On hosts of a shaped network, or all on loopback."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from shaped_network import ShapedNetwork

__all__ = ["Bed", "loopback", "shaped"]


class Bed(Protocol):
    def address(self, host: str) -> str: ...

    def run(
        self, host: str, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """A process in a group of its own; ``options`` are those of ``subprocess.Popen``."""
        ...


class _Loopback:
    def address(self, host: str) -> str:
        return "127.0.0.1"

    def run(
        self, host: str, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, env=env, start_new_session=True, stdin=subprocess.DEVNULL, **options)


@contextlib.contextmanager
def loopback() -> Iterator[Bed]:
    yield _Loopback()


@contextlib.contextmanager
def shaped(hosts: tuple[str, ...], rtt_ms: float, store_mbit: float) -> Iterator[Bed]:
    with ShapedNetwork(hosts, store_mbit=store_mbit, rtt_ms=rtt_ms) as network:
        measured = network.measure({"trainer": 4})
        print(
            f"link: round trip {1000 * measured.rtt_seconds:.1f} ms; four plain sockets get "
            f"{measured.payload_bytes_per_second * 8 / 1e6:.0f} of {store_mbit:.0f} mbit/s",
            flush=True,
        )
        yield network
