"""Does refill fill a narrow link to a far store, and hide it behind the computing? Three pods, four ranks.

    python benchmarks/shaped_link.py     # about 3 minutes; needs root, see shaped_network.py
    python benchmarks/shaped_link.py --chunk-size 16

Hosts are network namespaces of one machine; the store is an S3 server 25 ms away behind a link of 800 Mbit/s, which
the machine's cores can fill. Memory of the pods is a quarter of the dataset; ranks read by
``CacheDataset`` in a DataLoader. Measured, beside the floor of plain sockets through the same link:

- I/O-bound (no computing): how full the store's link is, while the epoch runs, and over all epochs.
- compute-bound (a batch is computed while half of what the link could carry comes): the epoch's time beside that of the
  same loop on random tensors; what the loop waits at the boundary of two epochs.
- the first batch of fresh jobs, from the registration on, in round trips.
- peak memory of the pods; and that each epoch delivered each sample once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine
from numpy.typing import NDArray
from shaped_network import ShapedNetwork
from shaped_pods import DATASET, ShapedPods
from targets import target

from refill.pods.planned_connection import PlannedConnection
from refill.protocol.job_spec import JobSpec

STORE_MBIT = 800
RTT_MS = 25
NUM_PODS = 3
NUM_RANKS = 4
NUM_SAMPLES = 6000
SAMPLE_BYTES = 100_000
MEMORY_SHARE = 0.25
CHUNK_SIZE = 8
BATCH = 32
EPOCHS = 3
IO_EPOCHS = 6
"""More: pods fill their memory in the first one, and give it away in the last."""
LOAD = 0.5
"""Of what the link can carry, what the compute-bound ranks need."""
FRESH_JOBS = 5
FIRST_BATCH = 4
"""Small: the four first batches together are not more than one chunk of each pod."""
INDEX_BYTES = NUM_SAMPLES * 16

Floats = NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--chunk-size", type=int, default=CHUNK_SIZE)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="refill-bench-") as folder,
        ShapedNetwork(store_mbit=STORE_MBIT, rtt_ms=RTT_MS) as network,
    ):
        print(
            f"{machine()}; store {RTT_MS} ms away behind {STORE_MBIT} Mbit/s; "
            f"{NUM_SAMPLES} samples of {SAMPLE_BYTES:,} bytes, memory {MEMORY_SHARE:.0%} of them; "
            f"chunks of {arguments.chunk_size}"
        )
        floor = network.measure()
        bench = ShapedLink(network, Path(folder), arguments.chunk_size)
        print(
            f"plain sockets: round trip {floor.rtt_seconds * 1000:.1f} ms, {floor.payload_bytes_per_second / 1e6:.1f} "
            f"MB/s of payload, {floor.share:.3f} of the link with headers",
            flush=True,
        )
        bench.first_batches(floor.rtt_seconds, floor.payload_bytes_per_second)
        bench.io_bound(floor.payload_bytes_per_second)
        bench.compute_bound(floor.payload_bytes_per_second)
        bench.memory()


class ShapedLink:
    """The store, the pods and what is measured on them. Processes end with the network."""

    def __init__(self, network: ShapedNetwork, folder: Path, chunk_size: int) -> None:
        self._network = network
        self._chunk_size = chunk_size
        self._folder = folder
        self._memory_bytes = int(NUM_SAMPLES * SAMPLE_BYTES * MEMORY_SHARE / NUM_PODS)
        self._cache = ShapedPods(network, folder)
        self._cache.start_store(NUM_SAMPLES, SAMPLE_BYTES)
        self._pods = self._cache.start_pods(NUM_PODS, self._memory_bytes)
        self._urls = self._pods.urls
        self._idle_bytes = max(map(_peak_bytes, self._pods.processes))
        """Peak memory of a pod that has just started."""

    def first_batches(self, rtt_seconds: float, link_rate: float) -> None:
        """From the first request of a fresh job on; ranks ask at once, a thread each, by connections that are new."""
        pods = [f"pod{pod}" for pod in range(NUM_PODS)]
        chunk_bytes = self._chunk_size * SAMPLE_BYTES
        bound = 3 + NUM_PODS * chunk_bytes / link_rate / rtt_seconds
        print(
            f"bound of the first batch: 3 round trips and {NUM_PODS} chunks of {self._chunk_size} samples: {bound:.1f}"
        )
        for window, what in ((10, "slow start"), (1000, "no slow start")):
            self._network.set_initial_window(window)
            fresh, floor = [], []
            for number in range(1 + FRESH_JOBS):
                fresh.append(self._first_batch(f"first-{window}-{number}") / rtt_seconds)
                floor.append(self._network.first_bytes_seconds(pods, (INDEX_BYTES, chunk_bytes)) / rtt_seconds)
            if window == 10:
                print(f"the first job of pods that have just started: {fresh[0][0]:.1f} round trips")
            first, last = np.median(fresh[1:], axis=0)
            print(
                f"{what}: first batch after {first:.1f} round trips, of the last rank {last:.1f}; plain sockets that "
                f"connect, read the index and one chunk for each pod: {np.median(floor):.1f}"
            )
            target(f"first batch of a fresh job, {what}: round trips", float(first), at_most=bound)
        self._network.set_initial_window(10)

    def io_bound(self, floor_rate: float) -> None:
        with LinkRecord(self._network) as link:
            ranks = self._ranks("io", compute_seconds=0, epochs=IO_EPOCHS)
        _check_exactly_once(ranks, IO_EPOCHS)
        in_epochs = []
        for epoch in range(IO_EPOCHS):
            came = np.sort(np.concatenate([rank["times"][rank["times"][:, 0] == epoch, 2] for rank in ranks]))
            # The steady state: from the first tenth of the batches to the last; then the epoch runs out of samples.
            start, end = came[len(came) // 10], came[len(came) * 8 // 10]
            in_epochs.append(link.share(start, end))
        times = np.concatenate([rank["times"] for rank in ranks])
        start, end = times[:, 1].min(), times[:, 2].max()
        payload_rate = IO_EPOCHS * NUM_SAMPLES * SAMPLE_BYTES / (end - start)
        read = link.bytes_between(start, end) / (IO_EPOCHS * NUM_SAMPLES * SAMPLE_BYTES)
        print(
            f"I/O-bound: {IO_EPOCHS} epochs in {end - start:.1f} s; bytes on the link with headers are {read:.3f} of "
            "those of the samples; steady state of each epoch: " + ", ".join(f"{share:.3f}" for share in in_epochs)
        )
        target("I/O-bound, steady state: store link in use", statistics.median(in_epochs), at_least=0.95)
        target("I/O-bound, all epochs with their boundaries: store link in use", link.share(start, end), at_least=0.95)
        target(
            "I/O-bound, all epochs: sample bytes of what plain sockets get", payload_rate / floor_rate, at_least=0.95
        )

    def compute_bound(self, floor_rate: float) -> None:
        compute_seconds = BATCH * SAMPLE_BYTES * NUM_RANKS / (floor_rate * LOAD)
        without = self._ranks("random", compute_seconds=compute_seconds, service=False)
        ranks = self._ranks("compute", compute_seconds=compute_seconds)
        _check_exactly_once(ranks, EPOCHS)
        ratios, gaps = [], []
        for rank, random in zip(ranks, without, strict=True):
            ratios += [mine / theirs for mine, theirs in zip(_epoch_seconds(rank), _epoch_seconds(random), strict=True)]
            gaps += [_first_wait(rank, epoch) for epoch in range(1, EPOCHS)]
        of_random = [_first_wait(rank, epoch) for rank in without for epoch in range(1, EPOCHS)]
        print(
            f"compute-bound: {compute_seconds * 1000:.0f} ms of computing for each batch of {BATCH}; epochs of random "
            f"tensors {statistics.median(map(statistics.median, map(_epoch_seconds, without))):.2f} s; epochs beside "
            f"them, by rank: {', '.join(f'{ratio:.3f}' for ratio in ratios)}"
        )
        print(
            f"waits at the epochs' boundaries, ms: {', '.join(f'{gap * 1000:.0f}' for gap in gaps)}; "
            f"of random tensors at most {max(of_random) * 1000:.0f}"
        )
        target("compute-bound: epoch beside random tensors, median", statistics.median(ratios), at_most=1.03)
        first, later = ratios[::EPOCHS], [ratio for i, ratio in enumerate(ratios) if i % EPOCHS]
        target("compute-bound: later epochs beside random tensors, worst", max(later), at_most=1.03)
        target("compute-bound: first epoch, with the start of the job, worst", max(first), at_most=1.03)
        target("compute-bound: longest wait at a boundary, in batch times", max(gaps) / compute_seconds, at_most=1)

    def memory(self) -> None:
        bound = self._memory_bytes * 1.15 + 150e6
        peaks = [_peak_bytes(pod) for pod in self._pods.processes]
        print(
            f"peak memory of the pods, MB: {', '.join(f'{peak / 1e6:.0f}' for peak in peaks)}; "
            f"just started {self._idle_bytes / 1e6:.0f}; budget {self._memory_bytes / 1e6:.0f}"
        )
        target("peak memory of a pod, of 1.15 budgets and 150 MB", max(peaks) / bound, at_most=1)

    def _first_batch(self, job: str) -> Floats:
        """Seconds to the first batch of the first rank that gets one, and of the last."""
        spec = JobSpec(job, DATASET, world_size=NUM_RANKS, chunk_size=self._chunk_size)
        connections = [PlannedConnection(self._urls[0], spec, rank, None, 30) for rank in range(NUM_RANKS)]
        seconds = [0.0] * NUM_RANKS

        def ask(rank: int) -> None:
            started = time.perf_counter()
            connections[rank].batch(0, np.arange(FIRST_BATCH))
            seconds[rank] = time.perf_counter() - started

        with self._network.inside("trainer"):
            threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(NUM_RANKS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            time.sleep(0.5)  # what is still being read
            connections[0].end_job()
        return np.array([min(seconds), max(seconds)])

    def _ranks(
        self, job: str, compute_seconds: float, service: bool = True, epochs: int = EPOCHS
    ) -> list[dict[str, Any]]:
        """Run all ranks over all epochs; returns what each of them wrote."""
        processes = []
        for rank in range(NUM_RANKS):
            given = {
                "rank": rank,
                "world_size": NUM_RANKS,
                "service": self._urls[rank % NUM_PODS] if service else "",
                "dataset": DATASET,
                "job": job,
                "chunk_size": self._chunk_size,
                "batch": BATCH,
                "epochs": epochs,
                "compute_seconds": compute_seconds,
                "samples_per_rank": NUM_SAMPLES // NUM_RANKS,
                "sample_bytes": SAMPLE_BYTES,
                "output": str(self._folder / f"{job}-{rank}.npz"),
            }
            argv = [sys.executable, str(Path(__file__).with_name("shaped_rank.py")), json.dumps(given)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            processes.append(self._network.run("trainer", argv, self._cache.environment, **pipes))
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise SystemExit("error: a rank ended before it began")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        for process in processes:
            if process.wait(120) != 0:
                raise SystemExit(f"error: a rank ended with {process.returncode}")
        if service:
            with self._network.inside("trainer"):
                PlannedConnection(self._urls[0], JobSpec(job, DATASET), 0, None, 30).end_job()
        return [dict(np.load(self._folder / f"{job}-{rank}.npz")) for rank in range(NUM_RANKS)]


class LinkRecord:
    """Bytes that have left the store, looked at five times a second in a thread of its own."""

    def __init__(self, network: ShapedNetwork) -> None:
        self._network = network
        self._times: list[float] = []
        self._bytes: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._record)

    def __enter__(self) -> LinkRecord:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def bytes_between(self, start: float, end: float) -> float:
        return float(np.interp(end, self._times, self._bytes) - np.interp(start, self._times, self._bytes))

    def share(self, start: float, end: float) -> float:
        """Of what the link can carry."""
        return self._network.share_of_link(self.bytes_between(start, end), end - start)

    def _record(self) -> None:
        while not self._stop.wait(0.2):
            before = time.monotonic()
            count = self._network.store_link_bytes()
            self._times.append((before + time.monotonic()) / 2)
            self._bytes.append(count)


def _peak_bytes(pod: subprocess.Popen[bytes]) -> int:
    status = Path(f"/proc/{pod.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def _epoch_seconds(rank: dict[str, Any]) -> list[float]:
    """From the first batch asked for to the last computed."""
    times = rank["times"]
    epochs = [times[times[:, 0] == epoch] for epoch in range(EPOCHS)]
    return [float(of_epoch[-1, 3] - of_epoch[0, 1]) for of_epoch in epochs]


def _first_wait(rank: dict[str, Any], epoch: int) -> float:
    """Seconds that the loop waits for the first batch of an epoch once the last of the one before is computed."""
    times = rank["times"]
    first = int(np.searchsorted(times[:, 0], epoch))
    return float(times[first, 2] - times[first - 1, 3])


def _check_exactly_once(ranks: list[dict[str, Any]], epochs: int) -> None:
    for epoch in range(epochs):
        delivered = np.zeros(NUM_SAMPLES, dtype=int)
        for rank in ranks:
            epoch_of_sample = np.repeat(rank["times"][:, 0], rank["sizes"])
            np.add.at(delivered, rank["ids"][epoch_of_sample == epoch], 1)
        if (delivered != 1).any():
            raise SystemExit(
                f"error: epoch {epoch}: {(delivered == 0).sum()} samples missing, "
                f"{(delivered > 1).sum()} delivered twice"
            )
    print(f"receipt: each of {epochs} epochs delivered {NUM_SAMPLES} samples, missing 0, duplicates 0")


if __name__ == "__main__":
    main()
