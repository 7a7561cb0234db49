"""Jobs under Accelerate that die in the middle of their second epoch, and go on from checkpoints that are older.

accelerate_jobs.py URL DATASET FOLDER CASES, a list in JSON. All come to the place where they die, and die together.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from lines import tell
from torch.utils.data import DataLoader

import refill

LAST_EPOCH, DIES_IN, SAVES_AT, DIES_AT = 2, 1, 3, 6
url, dataset_url, folder, cases = sys.argv[1:]
resumed = (Path(folder) / "resumed").exists()


def run(job, iterable=False, workers=0, **configuration):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**configuration))
    arguments = {"dataset": dataset_url, "job": job, "memory_bytes": 1 << 20, "transform": number_and_id}
    if iterable:
        dataset: Any = refill.CacheIterableDataset(url, batch_size=16, **arguments)
        loader = DataLoader(dataset, batch_size=16, num_workers=workers)
    else:
        dataset = refill.CacheDataset(url, **arguments)
        loader = DataLoader(dataset, batch_size=16, sampler=refill.EpochSampler(dataset), num_workers=workers)
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-9), loader)

    place = Path(folder) / job / "place.json"
    first_epoch = first_step = 0
    if resumed:
        accelerator.load_state(place.parent)
        first_epoch, first_step = json.loads(place.read_text())
    for epoch in range(first_epoch, LAST_EPOCH + 1):
        loader.set_epoch(epoch)
        begun = first_step if epoch == first_epoch else 0
        batches = loader
        if begun and not configuration.get("use_stateful_dataloader"):
            # Of a loader that dispatches batches, Accelerate skips single ones, not one for each process.
            rounds = configuration.get("dispatch_batches") and not (configuration.get("split_batches") or iterable)
            batches = accelerator.skip_first_batches(loader, begun * (accelerator.num_processes if rounds else 1))
        iterator = iter(batches)
        for step, batch in enumerate(iterator, begun):
            tell(job=job, rank=accelerator.process_index, epoch=epoch, step=step, ids=batch["__id__"].tolist())
            accelerator.backward(model(batch["size"]).sum())
            optimizer.step()
            optimizer.zero_grad()
            if not resumed and (epoch, step) == (DIES_IN, SAVES_AT):
                accelerator.save_state(place.parent)
                place.write_text(json.dumps([epoch, step + 1]))
            if not resumed and (epoch, step) == (DIES_IN, DIES_AT):
                return iterator  # kept, with its workers
    return None


def number_and_id(sample):
    return {"__id__": sample["__id__"], "size": torch.tensor([float(len(sample["bin"]))])}


kept = [run(**case) for case in json.loads(cases)]
if not resumed:
    time.sleep(1)  # ranks have reported what they have received
    os.kill(os.getpid(), signal.SIGKILL)
