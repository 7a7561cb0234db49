"""What is a kind of fault? A name, a line that says it, how often it is drawn, whom it meets, and how it is done."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.chaos.schedule import Fault, Setting

if TYPE_CHECKING:
    from tests.chaos.chaos_run import ChaosRun

__all__ = ["Kind", "a_pod", "a_rank", "nobody", "of_planned"]

Target = tuple[int, ...]


def nobody(setting: Setting, chooser: random.Random) -> Target:
    return ()


def a_pod(setting: Setting, chooser: random.Random) -> Target:
    return (chooser.randrange(setting.pods),)


def a_rank(setting: Setting, chooser: random.Random) -> Target:
    return (chooser.randrange(setting.ranks),)


def of_planned(weight: int, least_pods: int = 1) -> Callable[[Setting], int]:
    """The weight of what live jobs do not survive, or have not."""
    return lambda of: weight * (of.is_planned and of.pods >= least_pods)


@dataclass(frozen=True)
class Kind:
    name: str
    says: str
    weight: Callable[[Setting], int]
    """How often it is drawn, beside the others; 0: not by such a setting."""
    do: Callable[[ChaosRun, Fault], bool]
    """Carries a fault out, and plans its end. False: its target is down already."""
    target: Callable[[Setting, random.Random], Target] = nobody
    theme: str = ""
    """It is drawn by seeds that have this theme alone; empty: by all."""
    lasts: tuple[float, float] = (0.2, 2.0)
    """Seconds, from and to. ``(0, 0)``: it is over at once."""
    most: int = 100
    """So many in a run."""
