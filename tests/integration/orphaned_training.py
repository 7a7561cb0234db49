"""A training process that stands still: its loader workers wait for it, or for another rank. Killed by its test.

It prints the numbers of its workers, one line.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from typing import Any

import torch.utils.data

import refill


def padded(sample: dict[str, Any]) -> bytes:
    """More than a worker's pipe to the training process has room for."""
    return bytes(1 << 17)


def main() -> None:
    about = json.loads(sys.argv[1])
    dataset = refill.CacheDataset(**about["dataset"], transform=padded)
    if about["waits_for_another_rank"]:  # which has to post its own
        sampler: Any = refill.TraceSampler(dataset, range(100), any_order=True)
    else:
        sampler = refill.EpochSampler(dataset)
    loader: Any = torch.utils.data.DataLoader(
        dataset,
        batch_size=4,
        sampler=sampler,
        num_workers=2,
        collate_fn=list,
        multiprocessing_context=about["method"],
    )
    iterator = iter(loader)
    if not about["waits_for_another_rank"]:
        next(iterator)
    print(json.dumps([child.pid for child in multiprocessing.active_children()]), flush=True)
    time.sleep(1000)  # until it is killed
    del iterator


if __name__ == "__main__":
    main()
