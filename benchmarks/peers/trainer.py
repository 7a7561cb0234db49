"""What does a training loop get from one loader? It sleeps where it would compute, and measures what it waits for.

    python -m peers.trainer SETTING_FILE RESULT_FILE

One process as a training process is, with DataLoader workers. CPU is that of this process, all below it, and the pods.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from peers.loaders import LOADERS
from peers.setting import Setting
from peers.spread import co_batch, distance, missing, repeated
from peers.store_counts import open_counts

_TICKS = os.sysconf("SC_CLK_TCK")


def main(setting_file: str, result_file: str) -> None:
    setting = Setting.load(setting_file)
    loader = LOADERS[setting.loader]
    module = importlib.import_module(f"peers.{loader.module}")
    for url in setting.pod_urls:
        _wait_until_ready(url)
    counts = open_counts(setting.counts_file)
    before = counts.copy(), _cpu(setting.pod_pids)
    epoch_of = getattr(module, loader.function)(setting)
    epochs = []
    for epoch in range(setting.epochs):
        epochs.append(_epoch(epoch_of(epoch), setting, counts, *before))
        before = counts.copy(), _cpu(setting.pod_pids)
        if not epochs[-1]["complete"]:
            break
    Path(result_file).write_text(json.dumps(epochs))


def _epoch(loader: Any, setting: Setting, counts: np.ndarray, counted: np.ndarray, cpu: float) -> dict[str, Any]:
    """One epoch. Requests and CPU since the last one, or since before the loader was opened; time from here on."""
    computing, num_bytes, complete, kept = 0.0, 0, True, 0
    delivered = []
    started = time.perf_counter()
    for ids, content in loader:
        received = time.perf_counter()
        delivered.append(ids.numpy())
        num_bytes += len(content)
        kept = max(kept, _bytes_below(setting.folder))
        if received - started > setting.limit_seconds:
            complete = False
            break
        time.sleep(max(0.0, setting.compute_seconds - (time.perf_counter() - received)))
        computing += time.perf_counter() - received
    seconds = time.perf_counter() - started
    gets, others, read_bytes = (counts - counted).tolist()
    return {
        "samples": sum(len(ids) for ids in delivered),
        "bytes": num_bytes,
        "seconds": seconds,
        "wait_seconds": seconds - computing,
        "gets": gets,
        "other_requests": others,
        "read_bytes": read_bytes,
        "cpu_seconds": _cpu(setting.pod_pids) - cpu,
        "disk_bytes": kept,
        "co_batch": co_batch(delivered),
        "distance": distance(delivered),
        "repeated": repeated(delivered),
        "missing": missing(delivered, setting.samples),
        "complete": complete,
    }


def _wait_until_ready(pod_url: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            urllib.request.urlopen(f"{pod_url}/readyz", timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _cpu(pod_pids: tuple[int, ...]) -> float:
    """CPU seconds of this process, all processes below it, those of them that have ended, and the pods."""
    ticks, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(int(field) for field in fields[11:15])
    counted = {os.getpid(), *pod_pids}
    while below := {pid for pid, parent in parents.items() if parent in counted} - counted:
        counted |= below
    return sum(ticks.get(pid, 0) for pid in counted) / _TICKS


def _bytes_below(folder: str) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(where, name)).st_size
            except FileNotFoundError:  # evicted meanwhile
                continue
    return total


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
