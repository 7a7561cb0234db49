"""What is a run of chaos like, and what is one fault of it?"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Fault", "Setting"]


@dataclass(frozen=True)
class Setting:
    """What a run is like, apart from its faults."""

    seed: int
    policy: str
    volumes: str
    """What becomes of a killed pod's journal: ``kept``, ``none`` (there is none) or ``mixed`` (some are lost)."""
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

    @property
    def names_classes(self) -> bool:
        """Whether ranks ask for classes, within which pods redirect."""
        return self.policy == "drain" and self.order == "explicit"

    @property
    def is_planned(self) -> bool:
        return self.policy == "planned"

    @property
    def least_pods(self) -> int:
        """So many are always there."""
        return 2 if "scaling" in self.themes else self.pods

    def home_of(self, rank: int) -> int:
        """A pod that is always there."""
        return rank % self.least_pods

    @property
    def ranks_may_be_killed(self) -> bool:
        """With a killed rank goes its record of what it has. Should a pod lose its volume, too, nobody knows it any
        more; and a job that moves to other pods goes by what its ranks tell. A twin would take a killed rank's
        place. What planned orders give needs nobody's memory."""
        strict = self.is_planned or (self.volumes == "kept" and not {"scaling", "journals", "memory"} & {*self.themes})
        return (strict or "killed" in self.themes) and "twins" not in self.themes


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
