"""What is waited for after something was done to a pod?"""

from __future__ import annotations

from collections.abc import Callable

from tests.cluster.cluster import Cluster, is_ready

__all__ = ["replaced"]


def replaced(cluster: Cluster, name: str, uid: str) -> Callable[[], bool]:
    """Another pod of that name is ready."""

    def is_replaced() -> bool:
        pod = cluster.pods().get(name)
        return pod is not None and pod["metadata"]["uid"] != uid and is_ready(pod)

    return is_replaced
