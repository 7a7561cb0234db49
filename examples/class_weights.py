"""Sampling by weight: all classes come as often, however many samples they have.

torchrun --nproc-per-node=2 examples/class_weights.py URL DATASET JOB
"""

import os
import sys

import torch
import torch.distributed as dist

import refill

if len(sys.argv) != 4 or "RANK" not in os.environ:
    sys.exit("start this by torchrun: torchrun --nproc-per-node=2 examples/class_weights.py URL DATASET JOB")
url, dataset_url, job = sys.argv[1:]
dist.init_process_group("gloo")  # what ranks exchange here lies in memory of the CPU
rank, ranks = dist.get_rank(), dist.get_world_size()

dataset = refill.CacheDataset(url, dataset=dataset_url, job=job, decode=True, order="explicit")
labels = torch.from_numpy(dataset.labels)  # of all samples, by id: `refill pack` wrote them beside the index

# Each rank draws its part of an epoch, with a seed of its own. The generator goes into checkpoints.
weights = 1.0 / torch.bincount(labels)[labels]
generator = torch.Generator().manual_seed(1000 + rank)
draws = torch.utils.data.WeightedRandomSampler(weights, len(labels) // ranks, generator=generator)

sampler = refill.TraceSampler(dataset, draws)
loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    came = torch.zeros(int(labels.max()) + 1, dtype=torch.int64)
    for batch in loader:
        came += torch.bincount(batch["cls"], minlength=len(came))
    dist.all_reduce(came)
    if rank == 0:
        print(f"epoch {epoch}: of {int(came.sum())} samples, by class: {came.tolist()}", flush=True)
if rank == 0:
    print(f"in the dataset: {torch.bincount(labels).tolist()}", flush=True)

dist.destroy_process_group()
