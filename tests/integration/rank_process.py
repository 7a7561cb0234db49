"""A training process of one rank, told by lines what to do.

Run as ``python rank_process.py '{"url": ..., "arguments": {...}, "num_workers": 0, "method": null}'``. It answers each
line of its standard input with one of JSON: ``batch`` (the ids of the next one), ``look`` (all that asks for no batch),
``state``, ``end`` (in order). An error is answered with its kind and text.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from torch.utils.data import DataLoader

import refill
from refill.errors import RefillError


def main(settings: dict[str, Any]) -> None:
    dataset = refill.CacheDataset(settings["url"], **settings["arguments"])
    sampler = refill.EpochSampler(dataset)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=20,
        sampler=sampler,
        collate_fn=list,
        num_workers=settings["num_workers"],
        multiprocessing_context=settings["method"],
    )
    training = refill.timed(loader, dataset)
    if settings.get("state") is not None:
        training.load_state_dict(settings["state"])
    batches: Any = None
    for line in sys.stdin:
        try:
            if line == "batch\n":
                batches = iter(training) if batches is None else batches
                answer: Any = [sample["__id__"] for sample in next(batches)]
            elif line == "state\n":
                answer = training.state_dict()
            elif line == "look\n":
                dataset.epoch_counts(0)
                answer = [len(dataset), dataset[0]["__id__"]]
            else:
                return
        except RefillError as error:
            answer = {"error": type(error).__name__, "message": error.message}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
