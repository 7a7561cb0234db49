"""What did training get, and when? Two ranks in pods of their own, followed by what they print."""

from __future__ import annotations

import base64
import itertools
import subprocess
import threading
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tests.cluster.cluster import RELEASE, Cluster, Failed

__all__ = ["RANKS", "Ranks", "not_once"]

RANKS = 2
_SCRIPT = Path(__file__).with_name("rank.py")


class Ranks:
    """A job of two ranks that run until they are removed."""

    def __init__(
        self, cluster: Cluster, service_url: str, dataset: str, batch_seconds: float, node: str | None = None
    ) -> None:
        """:param node: where both ranks run; None: wherever the cluster puts them."""
        self._cluster = cluster
        self.job = f"try-{int(time.time())}"
        self.came_at: list[list[float]] = [[] for _ in range(RANKS)]
        """When each rank had each batch, by this machine's clock."""
        self.said: list[tuple[float, str]] = []
        """What the client warned of."""
        self._epochs: list[dict[int, np.ndarray]] = [{} for _ in range(RANKS)]
        self._num_samples = 0
        self._ahead: list[float] = [float("-inf")] * RANKS
        self._remove()
        image, policy = cluster.image
        cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": f"{RELEASE}-rank"},
                "data": {"rank.py": _SCRIPT.read_text()},
            },
            *(
                _pod(
                    rank,
                    image,
                    policy,
                    [service_url, dataset, self.job, str(rank), str(RANKS), str(batch_seconds)],
                    node,
                )
                for rank in range(RANKS)
            ),
        )
        for rank in range(RANKS):
            cluster.kubectl("wait", "--for=condition=Ready", f"pod/{_name(rank)}", "--timeout=180s")
        self._logs = [
            subprocess.Popen(
                ["kubectl", "-n", cluster.namespace, "logs", "-f", _name(rank)], stdout=subprocess.PIPE, text=True
            )
            for rank in range(RANKS)
        ]
        for rank in range(RANKS):
            threading.Thread(target=self._follow, args=(rank,), daemon=True).start()

    def _follow(self, rank: int) -> None:
        lines = self._logs[rank].stdout
        assert lines is not None
        for line in lines:
            word, _, rest = line.rstrip("\n").partition(" ")
            if word == "batch":
                at = float(rest.split()[1])
                # Clocks of two machines: the line that came fastest says how far they are apart.
                self._ahead[rank] = max(self._ahead[rank], at - time.time())
                self.came_at[rank].append(at)
            elif word == "epoch":
                epoch, samples, ids = rest.split()
                self._num_samples = int(samples)
                self._epochs[rank][int(epoch)] = np.frombuffer(zlib.decompress(base64.b64decode(ids)), "<i8")
            else:
                self.said.append((time.time(), line.strip()))

    def until_they_run(self, since: float, batches: int = 10) -> None:
        """Until each has had some batches after that time."""
        self._until(
            lambda: all(
                sum(at - ahead > since for at in came[-batches:]) == batches
                for came, ahead in zip(self.came_at, self._ahead, strict=True)
            ),
            "ranks get batches again",
        )

    def finished(self) -> int:
        """How many epochs both have finished."""
        return min(len(epochs) for epochs in self._epochs)

    def until_finished(self, epochs: int) -> None:
        self._until(lambda: self.finished() >= epochs, f"epoch {epochs - 1} ends")

    def _until(self, is_true: Any, what: str) -> None:
        def looked() -> bool:
            for rank, log in enumerate(self._logs):
                if log.poll() is not None:
                    told = self._cluster.kubectl("logs", _name(rank), "--tail=3", check=False)
                    raise Failed(f"rank {rank} ended: {told.strip()[-300:]}")
            return bool(is_true())

        self._cluster.until(looked, what)

    def wrong_in(self, epoch: int) -> str:
        """What is not exactly once in an epoch, as the ranks got it; empty: nothing."""
        wrong = not_once(self._num_samples, [epochs[epoch] for epochs in self._epochs])
        return wrong and f"epoch {epoch}: {wrong}"

    def gaps(self, since: float) -> list[float]:
        """Seconds between two batches of a rank, that ended after that time, longest first."""
        found = [
            later - earlier
            for came, ahead in zip(self.came_at, self._ahead, strict=True)
            for earlier, later in itertools.pairwise(list(came))
            if later - ahead > since
        ]
        return sorted(found, reverse=True)

    def end(self) -> None:
        for log in self._logs:
            log.terminate()
        self._remove()

    def _remove(self) -> None:
        names = [f"pod/{_name(rank)}" for rank in range(RANKS)]
        self._cluster.kubectl("delete", "--ignore-not-found", "--grace-period=1", f"configmap/{RELEASE}-rank", *names)


def not_once(num_samples: int, ids_of_ranks: list[np.ndarray]) -> str:
    """How many samples are missing or came twice; empty: none. Where shares can't be even, the last is filled up."""
    counts = Counter(np.concatenate(ids_of_ranks).tolist())
    missing = len(set(range(num_samples)) - set(counts))
    filled_up = (-num_samples) % len(ids_of_ranks)
    twice = max(0, sum(counts.values()) - len(counts) - filled_up)
    return f"{missing} missing, {twice} twice" if missing or twice else ""


def _name(rank: int) -> str:
    return f"{RELEASE}-rank-{rank}"


def _pod(rank: int, image: str, policy: str, arguments: list[str], node: str | None) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": _name(rank), "labels": {"app": f"{RELEASE}-rank"}},
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "rank",
                    "image": image,
                    "imagePullPolicy": policy,
                    "command": ["python", "/scripts/rank.py", *arguments],
                    "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [
                        {"name": "scripts", "mountPath": "/scripts"},
                        {"name": "tmp", "mountPath": "/tmp"},
                    ],
                }
            ],
            "volumes": [
                {"name": "scripts", "configMap": {"name": f"{RELEASE}-rank"}},
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }
