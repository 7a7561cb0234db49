"""How does a StatefulSet run its pods? As Kubernetes does, with processes on this machine in place of containers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests import forked_processes
from tests.conftest import free_port
from tests.helm.mounted_secrets import Secrets, mount
from tests.helm.rendering import Release
from tests.waiting import until_serving

__all__ = ["StatefulPods"]


class StatefulPods:
    """The pods of a release, each with the environment that the chart gives it. A context manager.

    Only what a container has from its surroundings is replaced: host name, addresses, and the folders of its volumes.
    Pods that were ever there keep their addresses, as they keep their DNS names.
    """

    def __init__(self, release: Release, folder: Path, most_pods: int, secrets: Secrets | None = None) -> None:
        self._release = release
        self._folder = folder
        self._ports = [(free_port(), free_port(), free_port()) for _ in range(most_pods)]
        mount(release.pod_template["spec"], folder, secrets or {})
        self._running: dict[int, forked_processes.ForkedProcess] = {}

    @property
    def pod_urls(self) -> list[str]:
        return self._urls("REFILL_POD_URLS", 0)

    def __enter__(self) -> StatefulPods:
        for ordinal in range(self._replicas):
            self._start(ordinal)
        for ordinal in range(self._replicas):
            self._wait_until_ready(ordinal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def upgrade(self, release: Release, after_each: Callable[[], Any] = lambda: None) -> None:
        """What follows ``helm upgrade``: pods too few are made, pods too many are ended; the others are replaced one by
        one, the last one first, each when the one before is ready."""
        before, self._release = self._replicas, release
        for ordinal in range(before, self._replicas):
            self._start(ordinal)
        for ordinal in reversed(range(self._replicas, before)):
            self._end(ordinal)
        after_each()
        for ordinal in reversed(range(min(before, self._replicas))):
            self._end(ordinal)
            self._start(ordinal)
            self._wait_until_ready(ordinal)
            after_each()
        for ordinal in range(before, self._replicas):
            self._wait_until_ready(ordinal)

    @property
    def _replicas(self) -> int:
        return int(self._release.the("StatefulSet")["spec"]["replicas"])

    def _urls(self, variable: str, port: int) -> list[str]:
        scheme = self._release.environment[variable].split(":")[0]
        return [f"{scheme}://127.0.0.1:{ports[port]}" for ports in self._ports[: self._replicas]]

    def _start(self, ordinal: int) -> None:
        port, peer_port, metrics_port = self._ports[ordinal]
        environment = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH")}
        environment |= {
            name: f"{self._folder}{value}" if value.startswith("/var/run/secrets/") else value
            for name, value in self._release.environment.items()
        }
        environment |= {
            "REFILL_HOST": "127.0.0.1",
            "REFILL_ORDINAL": str(ordinal),
            "REFILL_PORT": str(port),
            "REFILL_PEER_PORT": str(peer_port),
            "REFILL_METRICS_PORT": str(metrics_port),
            "REFILL_POD_URLS": ",".join(self.pod_urls),
            "REFILL_PEER_URLS": ",".join(self._urls("REFILL_PEER_URLS", 1)),
        }
        # Datasets of tests lie in folders, which a release names only if it is asked to.
        environment["REFILL_DATASET_URLS"] = environment.get("REFILL_DATASET_URLS") or "s3://,file:///"
        with self._log(ordinal).open("ab") as log:
            self._running[ordinal] = forked_processes.start_pod(
                self._release.container["command"][1:], environment, log
            )

    def _end(self, ordinal: int) -> None:
        process = self._running.pop(ordinal)
        process.terminate()
        process.wait(self._release.pod_template["spec"]["terminationGracePeriodSeconds"])

    def _wait_until_ready(self, ordinal: int) -> None:
        probe = self._release.container["readinessProbe"]["httpGet"]
        assert probe["port"] == "metrics"
        url = f"http://127.0.0.1:{self._ports[ordinal][2]}{probe['path']}"
        until_serving(url, lambda: self._running[ordinal].poll() is not None, self._log(ordinal).read_text)

    def _log(self, ordinal: int) -> Path:
        return self._folder / f"pod-{ordinal}.log"
