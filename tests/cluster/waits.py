"""What is waited for after something was done to a pod, and what took how long of that?"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from tests.cluster.cluster import Cluster, is_ready

__all__ = ["replaced", "steps_of"]


def replaced(cluster: Cluster, name: str, uid: str) -> Callable[[], bool]:
    """Another pod of that name is ready."""

    def is_replaced() -> bool:
        pod = cluster.pods().get(name)
        return pod is not None and pod["metadata"]["uid"] != uid and is_ready(pod)

    return is_replaced


def steps_of(cluster: Cluster, name: str, since: float) -> str:
    """When the pod that has this name now was made, when its container started, and when it was ready: in seconds after
    ``since``, by the cluster's clock and in whole seconds, as Kubernetes tells it."""
    pod = cluster.pods()[name]
    (container,) = pod["status"]["containerStatuses"]
    (ready,) = (each for each in pod["status"]["conditions"] if each["type"] == "Ready")
    times = {
        "the next pod was made": pod["metadata"]["creationTimestamp"],
        "its container started": container["state"]["running"]["startedAt"],
        "it was ready": ready["lastTransitionTime"],
    }
    after = {step: round(datetime.fromisoformat(at).timestamp() - since) for step, at in times.items()}
    return ", ".join(f"{step} after {max(0, seconds)} s" for step, seconds in after.items())
