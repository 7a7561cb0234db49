"""What does a process do that calls itself a rank and is not? It looks, or asks for the rank's batches, to the end.

    python -m tests.chaos.bystander '{"service": ..., "home": ..., ...}'

The plan is a rank's, whose ``workers`` say which: 0 looks at the job, as a notebook does, and keeps the object; 1 asks
for batches, as a second process of the rank. Whatever it receives it writes down: a twin is to receive nothing. Once it
knows the job it creates ``FILE.knows``.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import zlib
from pathlib import Path

import numpy as np
from tests.chaos.planned_rank import connection_of
from tests.chaos.rank import Answer, RankPlan, end_with_input

from refill.errors import RefillError
from refill.pods.planned_place import DealtConnection
from refill.pods.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec

LOOKS, ASKS = 0, 1
_PAUSE_SECONDS = 0.3
_POSITIONS = 16


def main() -> None:
    plan = RankPlan(**json.loads(sys.argv[1]))
    end_with_input()
    chooser = random.Random(f"{plan.seed} {os.getpid()}")
    spec = JobSpec.from_dict(plan.spec)
    pods: PodConnection | DealtConnection
    if spec.is_planned:
        pods = connection_of(plan)
        pods.asks_in_batches(plan.batch)
    else:
        pods = PodConnection(plan.service, spec, plan.rank, plan.home, plan.timeout_seconds)
    with Path(plan.file).open("a", buffering=1) as file:
        while True:
            epoch = chooser.randrange(plan.epochs)
            try:
                pods.info()
                Path(f"{plan.file}.knows").touch()
                if plan.workers == LOOKS:
                    pods.epoch_counts(epoch)
                else:
                    positions = np.arange(_POSITIONS) + _POSITIONS * chooser.randrange(10)
                    answer = pods.batch(epoch, positions)
                    checksums = [zlib.crc32(payload) for payload in answer.payloads]
                    line = Answer(epoch, positions.tolist(), answer.sample_ids.tolist(), checksums)
                    file.write(json.dumps(line) + "\n")
            except RefillError:
                pass  # refused, or a pod is down: what counts is what it receives
            time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    main()
