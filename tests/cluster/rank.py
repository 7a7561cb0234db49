"""What does a rank do while the cluster is shaken? Asks for batches, epoch after epoch, and tells of each.

Run in a pod of the pods' image: ``python rank.py SERVICE_URL DATASET JOB RANK RANKS BATCH_SECONDS``. Prints ``batch
EPOCH TIME`` for each batch, and ``epoch EPOCH SAMPLES IDS`` for each epoch: how many samples the dataset has, and the
ids that came, little-endian int64, packed by zlib and written in base64.
"""

from __future__ import annotations

import base64
import logging
import sys
import time
import zlib

import numpy as np

from refill.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec

_BATCH = 64


def main(service_url: str, dataset: str, job: str, rank: int, ranks: int, batch_seconds: float) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    connection = PodConnection(service_url, JobSpec(job, dataset, world_size=ranks), rank, None, 600)
    info = connection.info()
    mine, epoch = int(info["samples_per_rank"]), 0
    while True:
        came: list[np.ndarray] = []
        for start in range(0, mine, _BATCH):
            found = connection.batch(epoch, np.arange(start, min(start + _BATCH, mine)))
            print("batch", epoch, time.time(), flush=True)
            came.append(np.asarray(found.sample_ids))
            time.sleep(batch_seconds)
        ids = base64.b64encode(zlib.compress(np.concatenate(came).astype("<i8").tobytes())).decode()
        print("epoch", epoch, info["num_samples"], ids, flush=True)
        epoch += 1


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6]))
