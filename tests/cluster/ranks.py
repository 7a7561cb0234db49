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
from typing import Any, NamedTuple

import numpy as np
from tests.cluster.cluster import RELEASE, Cluster, Failed

from refill_service.interrupts import interrupts_after

__all__ = ["RANKS", "Batch", "Ranks", "RanksEnded", "not_once", "rank_pod"]

RANKS = 2
_SCRIPT = Path(__file__).with_name("rank.py")
_CLIENT = "/var/run/secrets/refill"
_AGAIN_SECONDS = 30
"""Of lines before the last one that came: clocks differ. What is told twice is known by its number."""


class RanksEnded(Failed):
    """A rank runs no more: there is nothing left to look at."""


class Batch(NamedTuple):
    at: float
    """By the rank's clock."""
    samples: int


class Ranks:
    """A job of two ranks that run until they are removed."""

    def __init__(
        self,
        cluster: Cluster,
        service_url: str,
        dataset: str,
        batch_seconds: float,
        node: str | None = None,
        secret: str = "",
    ) -> None:
        """:param node: where both ranks run; None: wherever the cluster puts them.
        :param secret: with the ``token`` that ranks show, and the ``ca.crt`` that they trust; empty: none.
        """
        self._cluster = cluster
        self.job = f"try-{int(time.time())}"
        self.batches: list[list[Batch]] = [[] for _ in range(RANKS)]
        self.wrong: dict[int, str] = {}
        """By epoch that both ranks have had: what did not come exactly once; empty: nothing."""
        self.receipts: dict[int, str] = {}
        """By epoch, what the pods said of it: ``exact``, or what else."""
        self.said: list[str] = []
        """What the clients warned of."""
        self._ids: list[dict[int, np.ndarray]] = [{} for _ in range(RANKS)]
        """Of epochs that the other rank has not had yet."""
        self._had = [0] * RANKS
        """Epochs of each rank."""
        self._ahead: list[float] = [float("-inf")] * RANKS
        self._over: list[str] = [""] * RANKS
        self._logs: list[subprocess.Popen[str] | None] = [None] * RANKS
        self._ending = False
        self._judging = threading.Lock()
        self._remove()
        try:
            self._start(service_url, dataset, batch_seconds, node, secret)
        except BaseException:
            with interrupts_after():
                self.end()
            raise

    def _start(self, service_url: str, dataset: str, batch_seconds: float, node: str | None, secret: str) -> None:
        cluster = self._cluster
        image, policy = cluster.image
        arguments = [service_url, dataset, self.job]
        cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": f"{RELEASE}-rank"},
                "data": {"rank.py": _SCRIPT.read_text()},
            },
            *(
                _pod(rank, image, policy, [*arguments, str(rank), str(RANKS), str(batch_seconds)], node, secret)
                for rank in range(RANKS)
            ),
        )
        for rank in range(RANKS):
            cluster.kubectl("wait", "--for=condition=Ready", f"pod/{rank_pod(rank)}", "--timeout=180s")
        for rank in range(RANKS):
            threading.Thread(target=self._follow, args=(rank,), daemon=True).start()

    def _follow(self, rank: int) -> None:
        """What a rank prints, also where the connection to the API server is lost now and then."""
        expected, came = 0, time.monotonic()
        while not self._ending and not self._over[rank]:
            since = [] if not expected else [f"--since={time.monotonic() - came + _AGAIN_SECONDS:.0f}s"]
            log = subprocess.Popen(
                ["kubectl", "-n", self._cluster.namespace, "logs", "-f", *since, rank_pod(rank)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C is for who runs this
            )
            self._logs[rank] = log
            assert log.stdout is not None
            for line in log.stdout:
                if not line.endswith("\n"):
                    break  # the connection was lost in the middle of it: it comes again
                number, _, rest = line.rstrip("\n").partition(" ")
                if not number.isdigit():
                    self.said.append(line.strip())
                elif int(number) >= expected:
                    expected, came = int(number) + 1, time.monotonic()
                    self._take(rank, rest)
            log.wait()
            self._over[rank] = self._how_it_ended(rank)
            time.sleep(1)

    def _how_it_ended(self, rank: int) -> str:
        """Empty: it runs, or nobody can tell."""
        try:
            phase = self._cluster.kubectl("get", "pod", rank_pod(rank), "-o", "jsonpath={.status.phase}")
        except Failed as failure:
            return str(failure) if "NotFound" in str(failure) else ""
        if phase == "Running":
            return ""
        return f"{phase}: {self._cluster.kubectl('logs', rank_pod(rank), '--tail=3', check=False).strip()[-300:]}"

    def _take(self, rank: int, told: str) -> None:
        word, _, rest = told.partition(" ")
        if word == "batch":
            _, at, samples = rest.split()
            # Clocks of two machines: the line that came fastest says how far they are apart.
            self._ahead[rank] = max(self._ahead[rank], float(at) - time.time())
            self.batches[rank].append(Batch(float(at), int(samples)))
        elif word == "epoch":
            epoch, num_samples, packed = rest.split()
            ids = np.cumsum(np.frombuffer(zlib.decompress(base64.b64decode(packed)), "<i4"))
            self._judge(rank, int(epoch), int(num_samples), ids)
        elif word == "receipt":
            number, _, says = rest.partition(" ")
            self.receipts[int(number)] = says
        else:
            self.said.append(rest)

    def _judge(self, rank: int, epoch: int, num_samples: int, ids: np.ndarray) -> None:
        with self._judging:
            self._ids[rank][epoch] = ids
            if all(epoch in of_rank for of_rank in self._ids):
                self.wrong[epoch] = not_once(num_samples, [of_rank.pop(epoch) for of_rank in self._ids])
            self._had[rank] = epoch + 1

    def until_they_run(self, since: float, batches: int = 10) -> None:
        """Until each has had some batches after that time."""
        self._until(
            lambda: all(
                sum(batch.at - ahead > since for batch in came[-batches:]) == batches
                for came, ahead in zip(self.batches, self._ahead, strict=True)
            ),
            "ranks get batches again",
        )

    def finished(self) -> int:
        """How many epochs both have finished."""
        return min(self._had)

    def until_finished(self, epochs: int) -> None:
        """And until the pods' receipts of them are there."""
        self._until(lambda: self.finished() >= epochs, f"epoch {epochs - 1} ends")
        self._until(lambda: epochs - 1 in self.receipts, f"the receipt of epoch {epochs - 1} comes")

    def _until(self, is_true: Any, what: str) -> None:
        def looked() -> bool:
            for rank, over in enumerate(self._over):
                if over:
                    raise RanksEnded(f"rank {rank} ended, {over}")
            return bool(is_true())

        self._cluster.until(looked, what)

    def wrong_in(self, epoch: int) -> str:
        """What is not exactly once in an epoch, as the ranks got it; empty: nothing."""
        wrong = self.wrong.get(epoch, "its line is missing in a rank's log")
        return wrong and f"epoch {epoch}: {wrong}"

    def gaps(self, since: float) -> list[float]:
        """Seconds between two batches of a rank, that ended after that time, longest first."""
        found = [
            later.at - earlier.at
            for came, ahead in zip(self.batches, self._ahead, strict=True)
            for earlier, later in itertools.pairwise(list(came))
            if later.at - ahead > since
        ]
        return sorted(found, reverse=True)

    def came_at(self) -> list[Batch]:
        """All batches of both, by this machine's clock."""
        return [
            Batch(batch.at - ahead, batch.samples)
            for came, ahead in zip(self.batches, self._ahead, strict=True)
            for batch in list(came)
        ]

    def end(self) -> None:
        self._ending = True
        for log in self._logs:
            if log is not None:
                log.terminate()
        self._remove()

    def _remove(self) -> None:
        names = [f"pod/{rank_pod(rank)}" for rank in range(RANKS)]
        self._cluster.kubectl("delete", "--ignore-not-found", "--grace-period=1", f"configmap/{RELEASE}-rank", *names)


def not_once(num_samples: int, ids_of_ranks: list[np.ndarray]) -> str:
    """How many samples are missing or came twice; empty: none. Where shares can't be even, the last is filled up."""
    counts = Counter(np.concatenate(ids_of_ranks).tolist())
    missing = len(set(range(num_samples)) - set(counts))
    filled_up = (-num_samples) % len(ids_of_ranks)
    twice = max(0, sum(counts.values()) - len(counts) - filled_up)
    return f"{missing} missing, {twice} twice" if missing or twice else ""


def rank_pod(rank: int) -> str:
    return f"{RELEASE}-rank-{rank}"


def _pod(rank: int, image: str, policy: str, arguments: list[str], node: str | None, secret: str) -> dict[str, Any]:
    variables = [("REFILL_TOKEN_FILE", "token"), ("REFILL_CA_FILE", "ca.crt")] if secret else []
    mounts = [{"name": "client", "mountPath": _CLIENT, "readOnly": True}] if secret else []
    volumes = [{"name": "client", "secret": {"secretName": secret}}] if secret else []
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": rank_pod(rank), "labels": {"app": f"{RELEASE}-rank"}},
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
                    "env": [{"name": name, "value": f"{_CLIENT}/{file}"} for name, file in variables],
                    "volumeMounts": [
                        *mounts,
                        {"name": "scripts", "mountPath": "/scripts"},
                        {"name": "tmp", "mountPath": "/tmp"},
                    ],
                }
            ],
            "volumes": [
                *volumes,
                {"name": "scripts", "configMap": {"name": f"{RELEASE}-rank"}},
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }
