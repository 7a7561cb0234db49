"""How long does a pod take to start? From starting its process, or its container, until ``/readyz`` says 200.

    python benchmarks/start_up.py
    python benchmarks/start_up.py --engine docker --image refill:0.1.0

Medians. With ``--image`` the container is as restricted as the chart's: a read-only file system, no capabilities; the
engine's own time is in the figure. ENGINE may have options: ``--engine 'podman --root /somewhere'``. Aim: 2 s.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shlex
import statistics
import subprocess
import sys
import time
import uuid

import httpx
from machine import machine
from targets import target

from refill_service.demo.local_cluster import PortClaims

AIM_SECONDS = 2.0
LOOK_AGAIN_SECONDS = 0.01
GIVE_UP_SECONDS = 60
CLAIMS = PortClaims()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--image", help="start a container of it in place of a process")
    parser.add_argument("--engine", default="docker", help="docker, podman, with options if wanted (default: docker)")
    args = parser.parse_args()
    seconds = [_ready_after(args.image, shlex.split(args.engine)) for _ in range(args.rounds)]
    what = f"a container of {args.image}" if args.image else "refill serve"
    print(f"{machine()}; median of {args.rounds} starts of {what}, until /readyz says 200")
    median = statistics.median(seconds)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{median:.2f} s (fastest {min(seconds):.2f}, slowest {max(seconds):.2f})")
    if not args.image:
        cpu_seconds = (used.ru_utime + used.ru_stime) / args.rounds
        print(f"{cpu_seconds:.2f} s of CPU each, with ending, which counts where other work keeps the cores busy")
    target("seconds from start to ready", median, at_most=AIM_SECONDS)


def _ready_after(image: str | None, engine: list[str]) -> float:
    port, peer_port = CLAIMS.take(2)
    environment = {
        "REFILL_HOST": "127.0.0.1",
        "REFILL_PORT": str(port),
        "REFILL_PEER_PORT": str(peer_port),
        "REFILL_ORDINAL": "0",
        "REFILL_MEMORY_BYTES": "64MiB",
        "REFILL_DRAIN_SECONDS": "0",
    }
    name = f"refill-start-{uuid.uuid4().hex[:8]}"
    if image is None:
        command = [sys.executable, "-m", "refill_service.cli", "serve"]
    else:
        options = ["--rm", "--network=host", "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges"]
        variables = [f"--env={variable}={value}" for variable, value in environment.items()]
        command = [*engine, "run", "--name", name, *options, *variables, image]
    begun = time.perf_counter()
    process = subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL)
    try:
        while time.perf_counter() - begun < GIVE_UP_SECONDS:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                    return time.perf_counter() - begun
            if process.poll() is not None:
                sys.exit(f"the pod ended with {process.returncode}: {shlex.join(command)}")
            time.sleep(LOOK_AGAIN_SECONDS)
        sys.exit(f"the pod was not ready after {GIVE_UP_SECONDS} s")
    finally:
        if image is not None:
            subprocess.run([*engine, "stop", name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
