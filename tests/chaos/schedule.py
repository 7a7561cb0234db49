"""What goes wrong in a run, and when? All of it follows from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["Fault", "Setting", "schedule_of", "setting_of"]

_MEAN_PAUSE_SECONDS = 0.45


@dataclass(frozen=True)
class Setting:
    """What a run is like, apart from its faults."""

    seed: int
    policy: str
    volumes: str
    """What becomes of a killed pod's journal: ``kept``, ``none`` (there is none) or ``mixed`` (some are lost)."""
    pods: int
    ranks: int
    workers: int
    chunk_size: int
    order: str
    pinned_fraction: float
    unix_socket: bool
    """Whether rank 0 asks over one, with memory that it lends."""
    scales: bool
    """Whether now and then all pods are replaced by two or by three."""

    def home_of(self, rank: int) -> int:
        """A pod that is always there."""
        return rank % (2 if self.scales else self.pods)

    @property
    def ranks_may_be_killed(self) -> bool:
        """With a killed rank goes its record of what it has. Should a pod lose its volume, too, nobody knows it any
        more: the receipt says how much is unknown, and exactly once is not promised. A job that moves to other pods
        goes by what its ranks tell."""
        return self.volumes == "kept" and not self.scales


@dataclass(frozen=True)
class Fault:
    at_seconds: float
    kind: str
    target: tuple[int, ...] = ()
    """A pod, how many there are to be, a rank, the two ends of a link ``(from, to)``, or of a killed rank
    ``(rank, its home from then on)``."""
    seconds: float = 0.0
    """How long it lasts."""

    def __str__(self) -> str:
        target = " ".join(map(str, self.target))
        return f"{self.at_seconds:6.2f} s  {self.kind} {target}" + (f" for {self.seconds:.2f} s" * (self.seconds > 0))


def setting_of(seed: int, policy: str | None = None, volumes: str | None = None, scales: bool | None = None) -> Setting:
    """What is not given follows from the seed."""
    chooser = random.Random(f"setting {seed}")
    drawn_policy, drawn_volumes = chooser.choice(("drain", "redox")), chooser.choice(("kept", "kept", "none", "mixed"))
    drawn_scales = random.Random(f"scales {seed}").random() < 0.25
    scales = drawn_scales if scales is None else scales
    return Setting(
        seed=seed,
        policy=policy or drawn_policy,
        volumes=volumes or drawn_volumes,
        pods=max(chooser.choice((2, 3)), 3 * scales),
        ranks=chooser.choice((2, 3)),
        workers=chooser.choice((1, 2)),
        chunk_size=chooser.choice((8, 16)),
        order=chooser.choice(("keyed", "keyed", "keyed", "explicit")),
        pinned_fraction=chooser.choice((0.0, 0.0, 0.1)),
        unix_socket=chooser.random() < 0.25,
        scales=scales,
    )


def schedule_of(setting: Setting, seconds: float) -> list[Fault]:
    """Faults that begin within so many seconds, in the order of their beginnings."""
    chooser = random.Random(f"schedule {setting.seed} {setting.policy} {setting.volumes}")
    pods, ranks = range(setting.pods), range(setting.ranks)
    links = [(a, b) for a in pods for b in pods if a != b]
    kinds: dict[str, int] = {
        "kill pod": 3,
        "lose pod": 3 * (setting.volumes == "mixed"),
        "end pod": 1,
        "scale": 10 * setting.scales,
        "pause pod": 2,
        "cut pods": 2,
        "reset pods": 2,
        "delay pods": 1,
        "kill rank": 2 * setting.ranks_may_be_killed,
        "pause rank": 1,
        "cut rank": 1,
        "reset rank": 2,
        "store refuses": 1,
        "store answers short": 1,
        "store answers wrong": 2,
        "store is slow": 1,
        "store stalls": 1,
    }
    faults, at = [], 0.0
    while (at := at + chooser.expovariate(1 / _MEAN_PAUSE_SECONDS)) < seconds:
        kind = chooser.choices(list(kinds), list(kinds.values()))[0]
        target: tuple[int, ...]
        if kind.endswith(" pod"):
            target = (chooser.choice(pods),)
        elif kind.endswith(" pods"):
            target = chooser.choice(links)
        elif kind.endswith(" rank"):
            rank = chooser.choice(ranks)
            moves = kind == "kill rank" and chooser.random() < 0.2
            home = chooser.choice(pods) if moves else setting.home_of(rank)
            target = (rank, home) if kind == "kill rank" else (rank,)
        elif kind == "scale":
            target = (chooser.choice((2, 3)),)
        else:
            target = ()
        lasts = 0.0 if kind.startswith(("reset", "kill rank")) else chooser.uniform(0.2, 2.0)
        faults.append(Fault(round(at, 2), kind, target, round(lasts, 2)))
    return faults
