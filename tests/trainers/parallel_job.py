"""FSDP2 x tensor parallelism on 2 x 2 processes: the two ranks of a tensor-parallel group share their batches.

torchrun --nproc-per-node=4 parallel_job.py URL DATASET JOB
"""

import sys
from typing import Any

import torch
import torch.distributed
from lines import tell
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import refill

url, dataset_url, job = sys.argv[1:]
torch.distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def first_byte(sample: dict[str, Any]) -> dict[str, Any]:
    return {"id": sample["__id__"], "x": torch.tensor([sample["bin"][0] / 256])}


dataset = refill.CacheDataset(
    url, dataset=dataset_url, job=job, policy="planned", batch_group=mesh["tp"], transform=first_byte
)
sampler = refill.EpochSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, 8, sampler=sampler, num_workers=1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        loss = model(batch["x"]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tell(
            group=mesh["dp"].get_local_rank(), member=mesh["tp"].get_local_rank(), epoch=epoch, ids=batch["id"].tolist()
        )
torch.distributed.barrier()
torch.distributed.destroy_process_group()
