"""How does refill compare with its peers? Same samples, same store, same link, same allowance, same loop.

    python -m peers.run [--quick] [--network loopback] [--only NAME ...] [--compute X] [--report]

Each loader's run is bounded by a limit on each epoch. Results are kept in build/peers/, one JSON each
(build/peers-tried/ where other conditions are tried): with --only the named loaders run again, with --report none; then
table and plot are made of all of them. Loaders run one after another, never two at once. The shaped network needs root,
see shaped_network.py; --network loopback needs nothing, and then there is no link to wait for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from machine import machine
from peers.beds import Bed, loopback, shaped
from peers.dataset import sizes
from peers.loaders import LOADERS, Loader
from peers.report import report
from peers.setting import ACCESS_KEY, SECRET_KEY, Setting

RESULTS = Path("build/peers")
SAMPLES = 5120
STORE_MBIT = 400
ROUND_TRIP_MS = 25.0
"""Between the store and the others."""
COMPUTE_OF_LINK = 1.05
"""The loop computes a little longer than the link needs for the samples once: who reads more than that waits."""
ALLOWANCES = (0.10, 0.25)
BATCH = 64
WORKERS = 2
EPOCHS = 2
LIMIT_SECONDS = 45.0
STORE_PORT, POD_PORT, PEER_PORT = 9000, 8000, 8100
NUM_PODS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,048 samples and a limit of 10 s: for development")
    parser.add_argument("--network", choices=("shaped", "loopback"), default="shaped")
    parser.add_argument("--only", nargs="+", choices=LOADERS, metavar="NAME", help=f"of: {', '.join(LOADERS)}")
    parser.add_argument(
        "--compute",
        type=float,
        default=COMPUTE_OF_LINK,
        metavar="X",
        help="the loop computes X times as long as the link needs (default: %(default)s); docs/ is left as it is for "
        "another X than that",
    )
    parser.add_argument("--report", action="store_true", help="run nothing; make table and plot of the results kept")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that whoever was started is ended
    samples = 2048 if arguments.quick else SAMPLES
    total_bytes = int(sizes(samples).sum())
    conditions = {
        "machine": machine(),
        "network": arguments.network,
        "store_mbit": STORE_MBIT,
        "round_trip_ms": ROUND_TRIP_MS,
        "samples": samples,
        "total_bytes": total_bytes,
        "batch_size": BATCH,
        "workers": WORKERS,
        "epochs": EPOCHS,
        "compute_seconds": arguments.compute * BATCH * (total_bytes / samples) * 8 / (STORE_MBIT * 1e6),
        "limit_seconds": 10.0 if arguments.quick else LIMIT_SECONDS,
        "pods": NUM_PODS,
    }
    as_published = (arguments.quick, arguments.network, arguments.compute) == (False, "shaped", COMPUTE_OF_LINK)
    results = RESULTS if as_published else RESULTS.with_name("peers-tried")
    results.mkdir(parents=True, exist_ok=True)
    if not arguments.report:
        _run_all(arguments.only or list(LOADERS), arguments.network, conditions, results)
    report(results, conditions, publish=as_published)


def _run_all(names: list[str], network: str, conditions: dict[str, Any], results: Path) -> None:
    hosts = ("store", *(f"pod{pod}" for pod in range(NUM_PODS)), "trainer")
    with (
        tempfile.TemporaryDirectory(prefix="refill-peers-") as temporary,
        loopback() if network == "loopback" else shaped(hosts, ROUND_TRIP_MS, STORE_MBIT) as bed,
    ):
        folder = Path(temporary)
        with _store(bed, folder, conditions["samples"]):
            for name in names:
                for allowance in ALLOWANCES if LOADERS[name].keeps_samples else (0.0,):
                    _run(bed, folder, name, allowance, conditions, results)


def _run(bed: Bed, folder: Path, name: str, allowance: float, conditions: dict[str, Any], results: Path) -> None:
    loader = LOADERS[name]
    work = folder / "work"
    (work / "cache").mkdir(parents=True)
    setting = Setting(
        loader=name,
        mean_bytes=conditions["total_bytes"] // conditions["samples"],
        allowance_bytes=int(allowance * conditions["total_bytes"]),
        store_url=f"http://{bed.address('store')}:{STORE_PORT}",
        pod_urls=(),
        pod_pids=(),
        counts_file=str(folder / "counts"),
        folder=str(work / "cache"),
        **{
            key: conditions[key]
            for key in (
                "samples",
                "total_bytes",
                "batch_size",
                "workers",
                "epochs",
                "compute_seconds",
                "limit_seconds",
            )
        },
    )
    try:
        with _pods(bed, loader, setting, work) as setting:
            setting.save(work / "setting.json")
            with (work / "trainer.log").open("wb") as log:
                argv = [sys.executable, "-m", "peers.trainer", f"{work}/setting.json", f"{work}/result.json"]
                trainer = bed.run("trainer", argv, _environment() | setting.environment(), **_to(log))
                try:
                    trainer.wait(60 + EPOCHS * (setting.limit_seconds + 15))
                except subprocess.TimeoutExpired:
                    print(f"{name}: ended by force", file=sys.stderr)
                finally:
                    _end(trainer)
        if not (work / "result.json").exists():
            print(f"{name} failed: {(work / 'trainer.log').read_text()[-3000:]}", file=sys.stderr)
            return
        epochs = json.loads((work / "result.json").read_text())
        result = {"loader": name, "allowance": allowance, "conditions": conditions, "epochs": epochs}
        (results / f"{re.sub('[^A-Za-z0-9]+', '-', name)}-{allowance:.0%}.json").write_text(json.dumps(result))
        speed = " and ".join(f"{epoch['samples'] / epoch['seconds']:.0f}" for epoch in epochs)
        print(f"{name}, allowance {allowance:.0%}: {speed} samples/s", flush=True)
    finally:
        shutil.rmtree(work)


@contextlib.contextmanager
def _store(bed: Bed, folder: Path, samples: int) -> Iterator[None]:
    """The S3 server, with the dataset in it, written from the store's own host: nothing of that crosses the link."""
    environment = _environment() | {
        "BIND_HOST": "0.0.0.0",
        "GATEWAY_PORT": str(STORE_PORT),
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "LOG_LEVEL": "WARNING",
    }
    with (folder / "store.log").open("wb") as log:
        argv = [sys.executable, "-m", "peers.store", str(folder / "counts")]
        store = bed.run("store", argv, environment, **_to(log))
        try:
            url = f"http://{bed.address('store')}:{STORE_PORT}"
            argv = [sys.executable, "-m", "peers.dataset", url, str(folder / "dataset"), str(samples)]
            writer = bed.run("store", argv, environment)
            if writer.wait() != 0:
                raise SystemExit(f"the dataset could not be written: {(folder / 'store.log').read_text()[-2000:]}")
            yield
        finally:
            _end(store)


@contextlib.contextmanager
def _pods(bed: Bed, loader: Loader, setting: Setting, work: Path) -> Iterator[Setting]:
    if not loader.pods:
        yield setting
        return
    hosts = [f"pod{pod}" for pod in range(NUM_PODS)]
    urls = [f"http://{bed.address(host)}:{POD_PORT + pod}" for pod, host in enumerate(hosts)]
    peer_urls = [f"http://{bed.address(host)}:{PEER_PORT + pod}" for pod, host in enumerate(hosts)]
    pods = []
    try:
        for pod, host in enumerate(hosts):
            environment = {
                "REFILL_ORDINAL": str(pod),
                "REFILL_PORT": str(POD_PORT + pod),
                "REFILL_PEER_PORT": str(PEER_PORT + pod),
                "REFILL_POD_URLS": ",".join(urls),
                "REFILL_PEER_URLS": ",".join(peer_urls),
                "REFILL_MEMORY_BYTES": str(setting.allowance_bytes // NUM_PODS),
                "REFILL_JOB_MEMORY_FRACTION": "1",
                "REFILL_PINNED_FRACTION": "0",  # nothing from one epoch to the next
            }
            with (work / f"{host}.log").open("wb") as log:
                argv = [sys.executable, "-m", "refill_service.cli", "serve"]
                pods.append(bed.run(host, argv, _environment() | setting.environment() | environment, **_to(log)))
        yield replace(setting, pod_urls=tuple(urls), pod_pids=tuple(pod.pid for pod in pods))
    finally:
        for process in pods:
            _end(process)


def _to(log: IO[bytes]) -> dict[str, Any]:
    return {"stdout": log, "stderr": subprocess.STDOUT}


def _environment() -> dict[str, str]:
    """This process's, without what would set up a store or a pod; libraries told to look for no newer versions."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "S3_", "REFILL_"))}
    quiet = {"LITDATA_DISABLE_VERSION_CHECK": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return kept | quiet | {"NO_PROXY": "*", "no_proxy": "*"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all of its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + 10
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)


if __name__ == "__main__":
    main()
