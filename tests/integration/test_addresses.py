"""A pod that comes back under its name with another address, as a pod of a StatefulSet does, is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import free_port

SCRIPT = """
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np

from refill.planned_connection import PlannedConnection
from refill.protocol.job_spec import JobSpec

dataset, port, peer_port = sys.argv[1:]
addresses, pods = {}, {}


def start(pod, address):
    addresses[pod] = address
    table = "".join(f"{each} refill-{number}.refill\\n" for number, each in addresses.items())
    Path("/etc/hosts").write_text("127.0.0.1 localhost\\n" + table)
    options = {
        "host": address,
        "port": port,
        "peer-port": peer_port,
        "ordinal": pod,
        "replicas": 2,
        "pod-urls": f"http://refill-{{ordinal}}.refill:{port}",
        "peer-urls": f"http://refill-{{ordinal}}.refill:{peer_port}",
        "memory-bytes": "4MiB",
        "pinned-fraction": 0,
        "dataset-urls": dataset,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    pods[pod] = subprocess.Popen([sys.executable, "-m", "refill_service.cli", "serve", *arguments])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            return httpx.get(f"http://{address}:{port}/readyz").raise_for_status()
        except (httpx.TransportError, httpx.HTTPStatusError):  # not yet there, or not yet ready
            time.sleep(0.05)


try:
    for pod in range(2):
        start(pod, f"127.0.0.{pod + 2}")
    spec = JobSpec("moves", dataset, chunk_size=16, memory_bytes=600_000, world_size=2)
    ranks = [PlannedConnection(f"http://refill-0.refill:{port}", spec, rank, None, 60) for rank in range(2)]
    samples = [s for rank in ranks for s in rank.batch(0, np.arange(200)).sample_ids.tolist()]
    assert ranks[1].home == f"http://refill-1.refill:{port}"
    pods[1].kill()
    pods[1].wait()
    start(1, "127.0.0.77")
    samples += [s for rank in reversed(ranks) for s in rank.batch(0, np.arange(200, 500)).sample_ids.tolist()]
    assert sorted(samples) == list(range(1000)), "not every sample exactly once"
    print("found again")
finally:
    for process in pods.values():
        process.kill()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a host table of its own")
def test_a_pod_with_another_address(packed: tuple[str, dict[str, bytes]], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.touch()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ports = f"{free_port()} {free_port()}"
    command = f"mount --bind {hosts} /etc/hosts && exec {sys.executable} {script} {packed[0]} {ports}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, timeout=120)
    if "Operation not permitted" in done.stderr:
        pytest.skip("no mount namespaces here")
    assert done.stdout == "found again\n", done.stderr[-2000:]
