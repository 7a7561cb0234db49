"""An S3 server with a dataset, and pods, each on a host of its own in a shaped network (shaped_network.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from shaped_network import ShapedNetwork

__all__ = ["DATASET", "Pods", "ShapedPods"]

DATASET = "s3://bench/data"
_SERVE = (sys.executable, "-m", "refill_service.cli", "serve")


class Pods(NamedTuple):
    urls: list[str]
    processes: list[subprocess.Popen[bytes]]


class ShapedPods:
    """Hosts are ``store``, and ``pod0``, ``pod1`` and so on. Processes end with the network.

    :param folder: for samples and logs.
    """

    def __init__(self, network: ShapedNetwork, folder: Path) -> None:
        self._network, self._folder = network, folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "REFILL_"))},
            "AWS_ENDPOINT_URL": f"http://{network.address('store')}:9000",
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        """Of whoever asks the store."""

    def start_store(self, num_samples: int, sample_bytes: int) -> None:
        """An S3 server, and the dataset in it, packed on the store's own host."""
        address = self._network.address("store")
        server = {"BIND_HOST": address, "GATEWAY_PORT": "9000"}
        self._start("store", "store", [sys.executable, "-m", "ministack"], server)
        self._network.wait_for("store", f"http://{address}:9000/", self._folder / "store.log")
        files = self._folder / "files"
        files.mkdir()
        generator = np.random.default_rng(1)
        for sample in range(num_samples):
            (files / f"{sample:06}.bin").write_bytes(generator.bytes(sample_bytes))
        make_bucket = "import boto3; boto3.client('s3').create_bucket(Bucket='bench')"
        pack = ["-m", "refill_service.cli", "pack", str(files), DATASET, "--quiet"]
        for argv in (["-c", make_bucket], pack):
            done = self._start("store", "pack", [sys.executable, *argv])
            if done.wait(120) != 0:
                raise SystemExit(f"error: packing ended with {done.returncode}: {self._log('pack')}")

    def start_pods(
        self, num_pods: int, memory_bytes: int, serve: Sequence[str] = _SERVE, port: int = 8000, name: str = "pod"
    ) -> Pods:
        """All of their memory is for the jobs, and nothing of it stays from one job to the next: each job reads all of
        the dataset.

        :param serve: what runs a pod.
        :param port: and the next one, for other pods.
        :param name: of their logs.
        """
        hosts = [f"pod{pod}" for pod in range(num_pods)]
        urls, peer_urls = (
            [f"http://{self._network.address(host)}:{each}" for host in hosts] for each in (port, port + 1)
        )
        processes = []
        for pod, host in enumerate(hosts):
            settings = {
                "REFILL_POD_URLS": ",".join(urls),
                "REFILL_PEER_URLS": ",".join(peer_urls),
                "REFILL_ORDINAL": str(pod),
                "REFILL_PORT": str(port),
                "REFILL_PEER_PORT": str(port + 1),
                "REFILL_MEMORY_BYTES": str(memory_bytes),
                "REFILL_JOB_MEMORY_FRACTION": "1",
                "REFILL_PINNED_FRACTION": "0",
            }
            processes.append(self._start(host, f"{name}{pod}", serve, settings))
        for pod, url in enumerate(urls):
            self._network.wait_for(hosts[pod], f"{url}/readyz", self._folder / f"{name}{pod}.log")
        return Pods(urls, processes)

    def _start(
        self, host: str, log: str, argv: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self._folder / f"{log}.log").open("ab") as output:
            return self._network.run(
                host, argv, self.environment | dict(environment or {}), stdout=output, stderr=subprocess.STDOUT
            )

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace").strip()[-500:]
