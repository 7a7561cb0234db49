"""One rank of a training run in a process of its own, which keeps checkpoints and may be killed at any time.

Run as ``python training_process.py '{"url": ..., "arguments": {...}, ...}'``. Writes the ids of each batch as a line of
``log``, and to ``checkpoint`` after every third batch where the loop stands and how many lines that are. After
``stop_after`` batches it says "stopped" and waits to be killed, while its workers go on fetching.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import refill

NUM_EPOCHS = 2


def main(settings: dict[str, Any]) -> None:
    loader_settings = {"batch_size": settings["batch_size"], "num_workers": settings["num_workers"], "collate_fn": list}
    kind: Any = StatefulDataLoader if settings["stateful"] else DataLoader
    if settings["iterable"]:
        of_job = {"batch_size": settings["batch_size"], **settings["arguments"]}
        dataset: Any = refill.CacheIterableDataset(settings["url"], **of_job)
        epochs, loader = dataset, refill.timed(kind(dataset, **loader_settings), dataset)
    else:
        dataset = refill.CacheDataset(settings["url"], **settings["arguments"])
        epochs = refill.EpochSampler(dataset)
        loader = refill.timed(kind(dataset, sampler=epochs, **loader_settings), dataset)
    model = torch.nn.Linear(1, 1)
    first_epoch, num_lines, checkpoint = 0, 0, Path(settings["checkpoint"])
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        loader.load_state_dict(saved["loader"])
        first_epoch, num_lines = saved["epoch"], saved["num_lines"]
    batches = 0
    with Path(settings["log"]).open("a") as log:
        log.truncate(length_of_lines(Path(settings["log"]), num_lines))
        for epoch in range(first_epoch, NUM_EPOCHS):
            epochs.set_epoch(epoch)
            for batch in loader:
                print(epoch, *(sample["__id__"] for sample in batch), file=log, flush=True)
                batches += 1
                num_lines += 1
                if batches % 3 == 0:
                    state = {"model": model.state_dict(), "loader": loader.state_dict()}
                    torch.save(state | {"epoch": epoch, "num_lines": num_lines}, checkpoint.with_suffix(".new"))
                    os.replace(checkpoint.with_suffix(".new"), checkpoint)
                if batches == settings["stop_after"]:
                    print("stopped", flush=True)
                    sys.stdin.read()


def length_of_lines(path: Path, count: int) -> int:
    return sum(map(len, path.read_bytes().splitlines(keepends=True)[:count]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
