"""Training and validation of one random_split under Accelerate, in two processes.

accelerate_parts.py URL DATASET JOB
"""

import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from lines import tell
from torch.utils.data import DataLoader, random_split

import refill

url, dataset_url, job = sys.argv[1:]


def number(sample):
    return {"__id__": sample["__id__"]}


for dispatched in (False, True):
    configuration = DataLoaderConfiguration(dispatch_batches=dispatched)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    dataset = refill.CacheDataset(
        url, dataset=dataset_url, job=f"{job}-{dispatched}", memory_bytes=1 << 20, transform=number
    )
    parts = random_split(dataset, [0.75, 0.25], torch.Generator().manual_seed(1))
    loaders = [DataLoader(part, batch_size=10, sampler=refill.EpochSampler(part)) for part in parts]
    prepared = [accelerator.prepare(loader) for loader in loaders]
    for epoch in range(2):
        for name, loader in zip(("train", "validation"), prepared, strict=True):
            loader.set_epoch(epoch)
            ids = [number for batch in loader for number in batch["__id__"].tolist()]
            tell(dispatched=dispatched, name=name, epoch=epoch, ids=ids)
