"""Which requests come from whoever looks after the pod? They are answered when it is busy, too.

Else it would be restarted for being busy.
"""

from __future__ import annotations

__all__ = ["HEALTH", "METRICS", "READY", "is_health", "looks_after_the_pod"]

HEALTH = "/healthz"
READY = "/readyz"
METRICS = "/metrics"


def is_health(path: str) -> bool:
    """Asked without a token, by kubelets and load balancers."""
    return path in (HEALTH, READY)


def looks_after_the_pod(path: str) -> bool:
    return is_health(path) or path == METRICS
