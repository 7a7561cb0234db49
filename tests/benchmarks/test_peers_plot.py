"""The plot of make bench-peers, which is drawn after half an hour: nothing may go wrong in it then."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")


def test_each_loader_has_a_place_in_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from peers.loaders import LOADERS
    from peers.report import US, Row, draw

    figures = {name: 1.0 for name in Row.__dataclass_fields__ if name not in ("loader", "repeated", "missing")}
    rows = [Row(loader=name, repeated=0, missing=0, **figures | {"allowance": 0.25}) for name in LOADERS]  # type: ignore[arg-type]
    draw(rows, US, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(name in drawn for name in LOADERS if name != "No-I/O"), "that one is the dashed line"
