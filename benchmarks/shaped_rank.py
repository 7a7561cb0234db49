"""What does one rank do in shaped_link.py? A loop as users write it, that notes when each batch came.

Started by shaped_link.py with one argument, JSON. It says ``ready`` when it is built, begins at the first line of its
standard input, and writes what it saw to ``output``: for each batch its epoch, when the loop asked for it, when it
came and when its computing was over (seconds of the machine's monotonic clock), and the sample ids.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import refill


class RandomTensors(Dataset[Any]):
    """The same batches without any I/O: one tensor of random bytes, again and again."""

    def __init__(self, num_samples: int, sample_bytes: int) -> None:
        self._num_samples = num_samples
        self._tensor = torch.randint(256, (sample_bytes,), dtype=torch.uint8)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self._tensor


def to_tensor(sample: dict[str, Any]) -> tuple[int, torch.Tensor]:
    return sample["__id__"], torch.frombuffer(sample["bin"], dtype=torch.uint8)


def main() -> None:
    given = json.loads(sys.argv[1])
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    torch.set_num_threads(1)
    sampler = None
    data: Dataset[Any]
    if given["service"]:
        data = refill.CacheDataset(
            given["service"],
            dataset=given["dataset"],
            job=given["job"],
            rank=given["rank"],
            world_size=given["world_size"],
            transform=to_tensor,
            chunk_size=given["chunk_size"],
            num_epochs=given["epochs"],
        )
        sampler = refill.EpochSampler(data)
    else:
        data = RandomTensors(given["samples_per_rank"], given["sample_bytes"])
    loader = DataLoader(data, given["batch"], sampler=sampler, num_workers=1, persistent_workers=True)
    print("ready", flush=True)
    sys.stdin.readline()

    times, sample_ids = [], []
    for epoch in range(given["epochs"]):
        asked = time.monotonic()
        for ids, tensors in loader:
            came = time.monotonic()
            if len(tensors) != len(ids):
                raise RuntimeError(f"{len(ids)} ids came with {len(tensors)} tensors")
            time.sleep(given["compute_seconds"])
            done = time.monotonic()
            times.append((epoch, asked, came, done))
            sample_ids.append(ids.numpy())
            asked = done
    np.savez(
        given["output"], times=np.array(times), sizes=[len(ids) for ids in sample_ids], ids=np.concatenate(sample_ids)
    )


if __name__ == "__main__":
    main()
