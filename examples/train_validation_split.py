"""One dataset, split by sample ids into a part to train with and one to validate with: two jobs.

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
rank, ranks = dist.get_rank(), dist.get_world_size()


def part(name: str) -> refill.CacheDataset:
    """The dataset, read by a job of the part's own: its epochs are apart from the other's."""
    return refill.CacheDataset(url, dataset=dataset_url, job=f"{job}-{name}", decode=True, order="explicit")


def loader_of(dataset: refill.CacheDataset, ids: torch.Tensor) -> torch.utils.data.DataLoader:
    """This rank's share of the ids, in another random order each epoch."""
    generator = torch.Generator().manual_seed(1000 + rank)
    draws = torch.utils.data.SubsetRandomSampler(ids[rank::ranks].tolist(), generator=generator)
    return torch.utils.data.DataLoader(dataset, batch_size=32, sampler=refill.TraceSampler(dataset, draws))


training, validation = part("training"), part("validation")
# One in ten is for validation: the same on all ranks and in all runs, since the seed is.
ids = torch.randperm(len(training), generator=torch.Generator().manual_seed(0))
held_out, rest = ids[: len(ids) // 10], ids[len(ids) // 10 :]

for name, loader, wanted in (
    ("training", loader_of(training, rest), rest),
    ("validation", loader_of(validation, held_out), held_out),
):
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        came = torch.zeros(len(ids), dtype=torch.int64)
        for batch in loader:
            came[batch["__id__"]] += 1
        dist.all_reduce(came)
        assert came[wanted].eq(1).all(), "each of the part once"
        assert int(came.sum()) == len(wanted), "none of the other part"
        if rank == 0:
            print(f"{name}, epoch {epoch}: {len(wanted)} samples, each once", flush=True)

dist.destroy_process_group()
