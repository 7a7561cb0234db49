"""How long does a training loop wait that loads its samples one after another? The times of DELI's model.

A loop without loader workers draws a batch of ``batch`` positions, loads one after another, and computes. Seconds are
of one sample, but for ``comp``. The file is JSON with the names of the fields here; what is left out is 0.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from refill.errors import InvalidInput

__all__ = ["NO_TIME", "FetchService", "LoopClock"]


@dataclass(frozen=True)
class FetchService:
    """What a fetch takes. Either by samples, ``fixed + per * samples``; or as a store with this latency and bandwidth
    would take for GETs of ``size`` bytes, ``parallel`` of them at once."""

    fixed: float = 0.0
    per: float = 0.0
    parallel: int = 0
    """0: by samples."""
    latency: float = 0.0
    size: float = 0.0
    bandwidth: float = math.inf
    """Bytes a second, of all GETs together."""

    def seconds(self, num_samples: int) -> float:
        """:param num_samples: that it reads; for none it takes no time."""
        if not num_samples:
            return 0.0
        if not self.parallel:
            return self.fixed + self.per * num_samples
        transfer = self.size / self.bandwidth
        rounds = -(-num_samples // self.parallel)
        return self.fixed + max(rounds * (self.latency + transfer), self.latency + num_samples * transfer)


@dataclass(frozen=True)
class LoopClock:
    batch: int = 0
    """Positions of a batch; 0: as the simulation has it."""
    g: float = 0.0
    """What a miss takes beside the look-up."""
    h: float = 0.0
    """What looking a sample up takes, a hit or a miss."""
    comp: float = 0.0
    """What computing takes, for each batch."""
    svc: FetchService = FetchService()
    ahead: int = 0
    """Batches that a loader asks for before the loop wants them, as torch's DataLoader does (workers x
    prefetch_factor); 0: DELI's loop, which asks when it wants them. Where ``svc`` is a store."""
    link: float = math.inf
    """Bytes a second that all pods together get from the store. Where ``svc`` is one."""

    @property
    def reads_take_time(self) -> bool:
        """Whether what pods read comes from a store, so that it arrives later than it is ordered."""
        return bool(self.svc.parallel)

    @classmethod
    def of_file(cls, path: Path) -> LoopClock:
        """Raises :class:`InvalidInput` with one line that names what is wrong."""
        try:
            given = json.loads(path.read_text())
        except OSError as error:
            raise InvalidInput(f"can't read clock {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"clock {path} is no JSON: {error}") from error
        found = _numbers(f"clock {path}", given, {each.name for each in fields(cls)}, nested="svc")
        if "svc" in found:
            found["svc"] = _service(f"svc of clock {path}", found["svc"])
        _check_count(f"clock {path}", found, "batch")
        _check_count(f"clock {path}", found, "ahead")
        if not found.get("link", 1):
            raise InvalidInput(f"clock {path}: link must be more than 0")
        return cls(**found)

    def computing_seconds(self, num_positions: int, batch_size: int) -> float:
        return -(-num_positions // batch_size) * self.comp


NO_TIME = LoopClock()


def _service(where: str, given: Any) -> FetchService:
    found = _numbers(where, given, {each.name for each in fields(FetchService)})
    _check_count(where, found, "parallel")
    of_store = ("parallel", "latency", "size", "bandwidth")
    if any(name in found for name in of_store):
        if "per" in found:
            raise InvalidInput(f"{where} has per, and {', '.join(sorted(set(of_store) & set(found)))}: use one form")
        if missing := [name for name in of_store if name not in found]:
            raise InvalidInput(f"{where} lacks {', '.join(missing)}")
        if not found["bandwidth"]:
            raise InvalidInput(f"{where}: bandwidth must be more than 0")
    return FetchService(**found)


def _numbers(where: str, given: Any, known: set[str], nested: str = "") -> dict[str, Any]:
    if not isinstance(given, dict):
        raise InvalidInput(f"{where} must be an object of names and numbers")
    if unknown := sorted(set(given) - known):
        raise InvalidInput(f"{where} has no {unknown[0]!r}; there are: {', '.join(sorted(known))}")
    for name, value in given.items():
        if name == nested:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise InvalidInput(f"{where}: {name} must be a number of at least 0, got {value!r}")
    return dict(given)


def _check_count(where: str, found: dict[str, Any], name: str) -> None:
    if name in found and not (isinstance(found[name], int) and found[name] >= 1):
        raise InvalidInput(f"{where}: {name} must be a whole number of at least 1, got {found[name]!r}")
