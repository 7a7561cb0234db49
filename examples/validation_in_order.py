"""A validation set in order: every sample once, each rank's part in the order of the dataset.

    torchrun --nproc-per-node=2 examples/validation_in_order.py URL DATASET JOB

With shuffle=False rank r of n gets samples r, r + n, r + 2n ... as DistributedSampler has it. Where the ranks don't
divide the dataset, the shorter ones get one sample from its beginning once more (padding), so that all have as many
batches; drop_last=True leaves the rest out instead. To count every sample once, drop what is padded, as below.
"""

import os
import sys

import torch
import torch.distributed as dist

import refill

if len(sys.argv) != 4 or "RANK" not in os.environ:
    sys.exit("start this by torchrun: torchrun --nproc-per-node=2 examples/validation_in_order.py URL DATASET JOB")
url, dataset_url, job = sys.argv[1:]
dist.init_process_group("gloo")  # what ranks exchange here lies in memory of the CPU
rank, ranks = dist.get_rank(), dist.get_world_size()

dataset = refill.CacheDataset(url, dataset=dataset_url, job=job, decode=True)
sampler = refill.EpochSampler(dataset, shuffle=False)
loader = torch.utils.data.DataLoader(dataset, batch_size=50, sampler=sampler, collate_fn=lambda samples: samples)

for epoch in range(2):  # a validation run is an epoch of its job
    sampler.set_epoch(epoch)
    ids = [sample["__id__"] for batch in loader for sample in batch]
    own = ids[: len(range(rank, len(dataset), ranks))]  # what follows is padding
    assert own == list(range(rank, len(dataset), ranks)), "in order"
    counts = torch.tensor([len(own), len(ids) - len(own)])
    dist.all_reduce(counts)
    if rank == 0:
        print(f"run {epoch}: {counts[0]} samples in order, each once, and {counts[1]} of padding", flush=True)

dist.destroy_process_group()
