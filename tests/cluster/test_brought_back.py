"""Does an interrupt leave nothing behind, whenever it comes? Without a cluster."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster import faults
from tests.cluster.__main__ import _stop, _Trial
from tests.cluster.cluster import Cluster, Failed
from tests.cluster.faults import dns_away
from tests.cluster.options import Options


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    before = {each: signal.signal(each, _stop) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


class _Cluster:
    """In which nothing can be installed, and whose user has had enough of it."""

    version = 1, 31
    removed = False

    def nodes(self) -> list[str]:
        return []

    def would_install(self, values: dict[str, Any]) -> None:
        pass

    def install(self) -> None:
        raise Failed("no")

    def uninstall(self) -> None:
        pass

    def left_over(self) -> list[str]:
        signal.raise_signal(signal.SIGINT)
        self.removed = True
        return []


def test_one_that_comes_while_all_is_removed_waits_for_that() -> None:
    cluster = _Cluster()
    with pytest.raises(KeyboardInterrupt):
        _Trial(cluster, {}, argparse.Namespace()).run([])  # type: ignore[arg-type]
    assert cluster.removed


@pytest.mark.parametrize("off", ["false", "sh -c 'kill -INT $PPID; exec sleep 60'"])
def test_what_was_taken_away_is_brought_back(off: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the command that takes it away fails half-way, or is interrupted."""
    monkeypatch.setattr(faults, "_AWAY_SECONDS", 0)
    with pytest.raises((Failed, KeyboardInterrupt)):
        dns_away(Cluster("ml", {}), Options(dns=(off, f"touch {tmp_path}/back")))
    assert (tmp_path / "back").exists()


def test_an_interrupt_waits_until_it_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_AWAY_SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        dns_away(Cluster("ml", {}), Options(dns=("true", f"sh -c 'kill -INT $PPID; sleep 0.5; touch {tmp_path}/back'")))
    assert (tmp_path / "back").exists()
