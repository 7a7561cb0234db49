"""What does a rank do while the cluster is shaken? Asks for batches, epoch after epoch, and tells of each.

Run in a pod of the pods' image: ``python rank.py SERVICE_URL DATASET JOB RANK RANKS BATCH_SECONDS``. Prints numbered
lines, so that whoever follows them finds their place again, and knows when one was lost:

- ``batch EPOCH TIME SAMPLES`` for each batch,
- ``epoch EPOCH SAMPLES IDS`` for each epoch: how many samples the dataset has, and the ids that came, in their order of
  size, as little-endian int32 differences, packed by zlib and written in base64,
- ``receipt EPOCH WORDS`` by rank 0, for each epoch that both ranks have had: ``exact``, or what the pods say else,
- ``said WORDS`` for what the client warns of.
"""

from __future__ import annotations

import base64
import logging
import queue
import sys
import threading
import time
import zlib

import numpy as np

from refill.errors import RefillError
from refill.pods.credentials import Credentials
from refill.pods.planned_connection import PlannedConnection
from refill.pods.pod_channel import PodChannel, Wait
from refill.protocol.job_spec import JobSpec

_BATCH = 64
_RECEIPT_SECONDS = 600.0
_lock = threading.Lock()
_told = 0


def tell(*words: object) -> None:
    global _told
    with _lock:
        print(_told, *words, flush=True)
        _told += 1


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tell("said", self.format(record).replace("\n", " "))


def main(service_url: str, dataset: str, job: str, rank: int, ranks: int, batch_seconds: float) -> None:
    logging.basicConfig(level=logging.WARNING, handlers=[_Said()])
    spec = JobSpec(job, dataset, world_size=ranks, policy="planned")
    connection = PlannedConnection(service_url, spec, rank, None, 600)
    connection.asks_in_batches(_BATCH)
    info = connection.info()
    over: queue.Queue[int] = queue.Queue()
    if rank == 0:
        threading.Thread(target=_tell_receipts, args=(service_url, job, over), daemon=True).start()
    mine, epoch = int(info["samples_per_rank"]), 0
    while True:
        came: list[np.ndarray] = []
        connection.deals(epoch, 0, 0, _BATCH)
        for start in range(0, mine, _BATCH):
            found = connection.batch(epoch, np.arange(start, min(start + _BATCH, mine)))
            tell("batch", epoch, time.time(), len(found.sample_ids))
            came.append(np.asarray(found.sample_ids))
            time.sleep(batch_seconds)
        differences = np.diff(np.sort(np.concatenate(came)), prepend=0).astype("<i4")
        tell("epoch", epoch, info["num_samples"], base64.b64encode(zlib.compress(differences.tobytes())).decode())
        over.put(epoch)
        epoch += 1


def _tell_receipts(service_url: str, job: str, over: queue.Queue[int]) -> None:
    """In a thread of its own: the loop waits for no receipt. Of each epoch until it is exact, or for so long."""
    channel = PodChannel(Credentials(), 2.0)
    wanted: dict[int, float] = {}
    while True:
        while not wanted or not over.empty():
            wanted[over.get()] = time.monotonic() + _RECEIPT_SECONDS
        for epoch, give_up in list(wanted.items()):
            says = _receipt(channel, service_url, f"/v1/jobs/{job}/epochs/{epoch}/receipt")
            if says == "exact" or time.monotonic() > give_up:
                tell("receipt", epoch, says)
                del wanted[epoch]
        time.sleep(0.5)


def _receipt(channel: PodChannel, service_url: str, path: str) -> str:
    try:
        found = channel.call("GET", service_url, path, Wait(5))
    except RefillError as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    if found["exact"]:
        return "exact"
    return f"{found['unconfirmed']} unconfirmed"


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6]))  # type: ignore[call-arg]
