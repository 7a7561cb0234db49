"""Pods of this machine that end and are replaced in order, as those of a StatefulSet are."""

from __future__ import annotations

import subprocess

from refill.errors import PodUnreachable
from refill_service.demo.local_cluster import LocalCluster

__all__ = ["OrderedCluster"]

_END_SECONDS = 60
"""Longer than ``grace_seconds``, in which a pod answers what is under way."""


class OrderedCluster(LocalCluster):
    """As :class:`LocalCluster`, for what a cluster does with pods beside crashes."""

    def replace(self, pod: int) -> subprocess.Popen[bytes]:
        """Start a pod's successor at other ports, beside the process that it has: that one is the caller's to end."""
        earlier, ports = self.processes[pod], self._claims.take(2)
        self._ports[pod] = (ports[0], ports[1])
        self.restart(pod, wait=False)
        return earlier

    def end(self) -> None:
        """End all pods in order, the last one first, as those of a StatefulSet end."""
        for pod in reversed(range(len(self.processes))):
            self.end_pod(pod)
        self.processes = []

    def end_pod(self, pod: int) -> None:
        """End a pod in order."""
        self.processes[pod].terminate()
        try:
            self.processes[pod].wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            raise PodUnreachable(
                f"pod {pod} was told to end {_END_SECONDS} s ago: {self.log(pod).strip()[-500:]}"
            ) from None

    def start(self, num_pods: int) -> None:
        """Start so many pods, after :meth:`end`."""
        self._take_ports(num_pods)
        self.num_pods = num_pods
        self._start_all()
