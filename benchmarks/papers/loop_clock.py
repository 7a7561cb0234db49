"""Which times does a training loop have? Those of DELI's model, or of a store that reads come from.

A loop without loader workers draws a batch of ``batch`` positions, loads one after another, and computes. Seconds are
of one sample, but for ``comp``. The file is JSON with the names of the fields here; what is left out is 0, but for
``in_step``.
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
    """What a fetch takes, in one of two forms. By samples: ``fixed + per * samples``. Or as a store would take for GETs
    of ``size`` bytes, ``parallel`` of them at once: ``fixed``, and then the longer of rounds of so many GETs, each with
    its latency and the transfer of one, and of one latency and all transfers one after another.

    Where pods read (``timed_epochs.py``), the second form is of each read: a pod has ``parallel`` of them under way,
    and each takes ``fixed`` and ``latency``, and its part of what the pod's ``bandwidth`` and the link carry meanwhile.
    """

    fixed: float = 0.0
    per: float = 0.0
    workers: float = math.inf
    """Of the first form: what is done of all fetches under way at once; more of them than that slow each other down.
    It need not be whole: the service of DELI's paper behaves as 1.4 would."""
    insert: float = 0.0
    """Of the first form: seconds that putting one sample into the cache takes, one after another when a fetch is
    done."""
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
    in_step: bool = True
    """Whether ranks compute each step together, when the last of them has its batch, as they do that exchange
    gradients; else each goes its own way, and they meet at the end of an epoch."""

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
        found = _numbers(f"clock {path}", given, {each.name for each in fields(cls)}, but=("svc", "in_step"))
        if "svc" in found:
            found["svc"] = _service(f"svc of clock {path}", found["svc"])
        if not isinstance(found.get("in_step", True), bool):
            raise InvalidInput(f"clock {path}: in_step must be true or false, got {found['in_step']!r}")
        _check_count(f"clock {path}", found, "batch")
        _check_count(f"clock {path}", found, "ahead")
        if not found.get("link", 1):
            raise InvalidInput(f"clock {path}: link must be more than 0")
        return cls(**found)


NO_TIME = LoopClock()


def _service(where: str, given: Any) -> FetchService:
    found = _numbers(where, given, {each.name for each in fields(FetchService)})
    _check_count(where, found, "parallel")
    of_store = ("parallel", "latency", "size", "bandwidth")
    if any(name in found for name in of_store):
        if of_samples := [name for name in ("per", "workers", "insert") if name in found]:
            others = ", ".join(sorted(set(of_store) & set(found)))
            raise InvalidInput(f"{where} has {', '.join(of_samples)}, and {others}: use one form")
        if missing := [name for name in of_store if name not in found]:
            raise InvalidInput(f"{where} lacks {', '.join(missing)}")
        if not found["bandwidth"]:
            raise InvalidInput(f"{where}: bandwidth must be more than 0")
    if not found.get("workers", 1):
        raise InvalidInput(f"{where}: workers must be more than 0")
    return FetchService(**found)


def _numbers(where: str, given: Any, known: set[str], but: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise InvalidInput(f"{where} must be an object of names and numbers")
    if unknown := sorted(set(given) - known):
        raise InvalidInput(f"{where} has no {unknown[0]!r}; there are: {', '.join(sorted(known))}")
    for name, value in given.items():
        if name in but:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise InvalidInput(f"{where}: {name} must be a number of at least 0, got {value!r}")
    return dict(given)


def _check_count(where: str, found: dict[str, Any], name: str) -> None:
    if name in found and not (isinstance(found[name], int) and found[name] >= 1):
        raise InvalidInput(f"{where}: {name} must be a whole number of at least 1, got {found[name]!r}")
