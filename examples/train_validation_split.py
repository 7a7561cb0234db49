"""One dataset, split into a part to train with and one to validate with. Each is a job of its own.

torchrun --nproc-per-node=2 examples/train_validation_split.py URL DATASET JOB
"""

import os
import sys

import torch
import torch.distributed as dist

import refill

if len(sys.argv) != 4 or "RANK" not in os.environ:
    sys.exit("start this by torchrun: torchrun --nproc-per-node=2 examples/train_validation_split.py URL DATASET JOB")
url, dataset_url, job = sys.argv[1:]
dist.init_process_group("gloo")  # what ranks exchange here lies in memory of the CPU


def only_its_id(sample: dict) -> dict:
    """In training: the picture, decoded and resized (docs/CLIENT.md). Photos have sizes of their own."""
    return {"__id__": sample["__id__"]}


dataset = refill.CacheDataset(url, dataset=dataset_url, job=job, transform=only_its_id)
# One in ten is for validation: the same on all ranks and in all runs, since the seed is.
training, validation = torch.utils.data.random_split(dataset, [0.9, 0.1], torch.Generator().manual_seed(0))

for name, part, shuffle in (("training", training, True), ("validation", validation, False)):
    wanted = list(part.indices)
    sampler = refill.EpochSampler(part, shuffle=shuffle)
    loader = torch.utils.data.DataLoader(part, batch_size=32, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        came = torch.zeros(len(dataset), dtype=torch.int64)
        for batch in loader:
            came[batch["__id__"]] += 1
        dist.all_reduce(came)
        again = int(came.sum()) - len(wanted)
        assert came[wanted].ge(1).all(), "each of the part"
        assert again == sampler.total_size - len(wanted), (
            "none of the other part, and none twice but to fill up the ranks"
        )
        if dist.get_rank() == 0:
            print(
                f"{name}, epoch {epoch}: {len(wanted)} samples, each once, {again} again to fill up the ranks",
                flush=True,
            )

dist.destroy_process_group()
