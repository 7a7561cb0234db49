"""Real pods before a store that is bound by requests: what the clock says beside each, without the pods."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_redirection_hides_requests_behind_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    orders = importlib.import_module("orders")
    store, link = orders.by_requests(3), orders.LinkSpeed(0.0, 1e9, 1.0)
    found = {
        each.policy: orders.predicted(each, link, 3, store)
        for each in orders.END_TO_END
        if each.policy in ("exact", "redox")
    }
    alone = store.num_samples * store.hold_seconds / store.threads
    computing = store.num_samples / store.batch * store.compute_seconds
    assert computing == pytest.approx(0.36 * alone)
    assert computing < found["redox"].run_seconds < alone / 1.5
    assert found["redox"].run_seconds < found["exact"].run_seconds / 1.5
    assert found["exact"].gets > 2 * found["redox"].gets
    assert found["redox"].samples_read > 2 * found["exact"].samples_read
