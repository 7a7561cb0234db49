"""What is a run of chaos like, and what is one fault of it?"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Fault", "Setting"]


@dataclass(frozen=True)
class Setting:
    """What a run is like, apart from its faults."""

    seed: int
    policy: str
    themes: tuple[str, ...]
    """What it draws beside the faults that all runs draw: some of :data:`tests.chaos.kinds.THEMES`."""
    pods: int
    ranks: int
    workers: int
    epochs: int
    chunk_size: int
    order: str
    pinned_fraction: float
    unix_socket: bool
    """Whether rank 0 asks over one, with memory that it lends."""
    drop_last: bool = False
    names_memory: bool = True
    """Whether the job says how much it takes; else pods plan by what they have."""
    has_home: bool = True
    """Whether ranks are given the pod that they ask; else they ask all."""
    beside: int = 0
    """Jobs of the theme ``sweep`` that begin with the first one."""
    beside_pace: float = 1.0
    """Their pauses between two batches, in those of the first job."""
    pinned_disk: bool = False
    """Whether pods have a disk for more of the pinned tier."""

    @property
    def is_planned(self) -> bool:
        return self.policy == "planned"

    @property
    def is_mixture(self) -> bool:
        return "mixture" in self.themes

    @property
    def least_pods(self) -> int:
        """So many are always there."""
        return 2 if "scaling" in self.themes else self.pods

    def home_of(self, rank: int) -> int:
        """A pod that is always there."""
        return rank % self.least_pods


@dataclass(frozen=True)
class Fault:
    at_seconds: float
    kind: str
    target: tuple[int, ...] = ()
    """As the kind says."""
    seconds: float = 0.0
    """How long it lasts."""

    def __str__(self) -> str:
        target = " ".join(map(str, self.target))
        return f"{self.at_seconds:6.2f} s  {self.kind} {target}" + (f" for {self.seconds:.2f} s" * (self.seconds > 0))
