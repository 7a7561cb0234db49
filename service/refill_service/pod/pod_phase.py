"""Where in its life is a pod? Readiness and the taking of new jobs follow from it; only ``serve`` moves it on."""

from __future__ import annotations

from enum import Enum

__all__ = ["PodPhase"]


class PodPhase(Enum):
    """How far a pod is between its start and its end."""

    STARTING = "starting"
    """Its servers do not all listen yet."""
    READY = "ready"
    STOPPING = "stopping"
    """It was told to end: jobs that it has go on for a while, new ones are refused."""
