"""Epochs of several jobs under Accelerate, one job after another, in one process or several.

accelerate_epochs.py URL DATASET CASES, a list in JSON
"""

import json
import sys
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from lines import tell
from torch.utils.data import BatchSampler, DataLoader

import refill
from refill.errors import RefillError


def run(
    job,
    iterable=False,
    batch_size=16,
    workers=0,
    drop_last=False,
    loader_of="sampler",
    skip=0,
    epochs=2,
    **configuration,
):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**configuration))
    arguments = {"dataset": dataset_url, "job": job, "memory_bytes": 1 << 20, "transform": number_and_id}
    if iterable:
        dataset: Any = refill.CacheIterableDataset(url, batch_size=batch_size, **arguments)
        loader = DataLoader(dataset, batch_size=batch_size, num_workers=workers, drop_last=drop_last)
    else:
        dataset = refill.CacheDataset(url, **arguments)
        sampler = refill.EpochSampler(dataset)
        if loader_of == "batch_sampler":
            how: dict[str, Any] = {"batch_sampler": BatchSampler(sampler, batch_size, drop_last)}
        else:
            how = {"batch_size": batch_size, "sampler": sampler, "drop_last": drop_last}
        loader = DataLoader(dataset, num_workers=workers, **how)
    loader = accelerator.prepare(loader)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        ids, gathered = [], []
        for batch in accelerator.skip_first_batches(loader, skip) if skip and epoch == epochs - 1 else loader:
            ids.append(batch["__id__"].tolist())
            gathered += accelerator.gather_for_metrics(batch["__id__"]).tolist()
        tell(
            job=job,
            rank=accelerator.process_index,
            epoch=epoch,
            ids=[each for batch in ids for each in batch],
            sizes=list(map(len, ids)),
            length=len(loader),
            gathered=gathered,
        )


def number_and_id(sample):
    # Accelerate's dispatcher sends tensors only, so the text of __key__ must not be there.
    return {"__id__": sample["__id__"], "size": torch.tensor([float(len(sample["bin"]))])}


url, dataset_url, cases = sys.argv[1:]
for case in json.loads(cases):
    try:
        run(**case)
    except RefillError as error:
        tell(job=case["job"], error=f"{type(error).__name__}: {error}")
        raise
PartialState().destroy_process_group()
