"""How does the object store fail? Requests are refused, late or never answered, answers short or damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.kinds.kind import Kind
from tests.chaos.schedule import Fault

if TYPE_CHECKING:
    from tests.chaos.chaos_run import ChaosRun

_SHARE = 0.5
"""Of requests to the store that a fault hits."""
_STALLED_SHARE = 0.1
_FAULTS = {
    "store refuses": "refused",
    "store answers short": "short",
    "store answers wrong": "wrong",
    "store is slow": "slow",
    "store stalls": "stalled",
}


def _to_store(run: ChaosRun, fault: Fault) -> bool:
    what = _FAULTS[fault.kind]
    setattr(run.store, what, _STALLED_SHARE if what == "stalled" else _SHARE)
    run.then(fault, f"{fault.kind}: ends", lambda: setattr(run.store, what, 0.0))
    return True


KINDS = [
    Kind("store refuses", "half of the requests are answered 503 SlowDown", lambda _: 1, _to_store),
    Kind("store answers short", "half of the answers end early", lambda _: 1, _to_store),
    Kind("store answers wrong", "half of the answers have a flipped bit, the first time", lambda _: 2, _to_store),
    Kind("store is slow", "half of the answers are 0.3 s late", lambda _: 1, _to_store),
    Kind("store stalls", "a tenth of the requests is answered after 12 s", lambda _: 1, _to_store),
]
