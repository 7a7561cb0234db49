"""A training script that is tried out: it takes a few batches, and ends in order or is killed.

Run as ``python short_run.py '{"url": ..., "arguments": {...}, "num_workers": 0, "batches": 5, "is_killed": false}'`` it
prints one line of JSON: what the pods gave the job, or the error that it was refused with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

import refill
from refill.errors import RefillError


def main(settings: dict[str, Any]) -> None:
    try:
        dataset = refill.CacheDataset(settings["url"], **settings["arguments"])
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=32,
            sampler=refill.EpochSampler(dataset),
            collate_fn=list,
            num_workers=settings["num_workers"],
        )
        samples = [sample["__id__"] for batch in islice(loader, settings["batches"]) for sample in batch]
    except RefillError as error:
        print(json.dumps({"error": type(error).__name__, "message": error.message}), flush=True)
        return
    info = dataset.connection.info()
    given = {name: info[name] for name in ("memory_bytes", "chunks_in_memory", "chunk_size")}
    print(json.dumps(given | {"plan_id": info.get("plan_id"), "samples": len(set(samples))}), flush=True)
    if settings["is_killed"]:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
