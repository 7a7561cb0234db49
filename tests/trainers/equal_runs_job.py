"""The same training on any number of ranks: a global batch of 32, an epoch of which is left halfway and resumed.

equal_runs_job.py URL DATASET JOB STATE STOP_AT: goes on from the file STATE if it is there; stops after step STOP_AT
of epoch 1 and writes it, unless that is 0.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from lines import tell

import refill

url, dataset_url, job, state_file, stop_at = sys.argv[1:]
several = "RANK" in os.environ
if several:
    torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank() if several else 0
processes = torch.distributed.get_world_size() if several else 1
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)


def first_byte(sample: dict[str, Any]) -> dict[str, Any]:
    return {"id": sample["__id__"], "x": torch.tensor([sample["bin"][0] / 256], dtype=torch.float64)}


dataset = refill.CacheDataset(url, dataset=dataset_url, job=job, policy="planned", transform=first_byte)
sampler = refill.EpochSampler(dataset, drop_last=True)
loader = refill.timed(torch.utils.data.DataLoader(dataset, 32 // processes, sampler=sampler, num_workers=1), dataset)
model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
first_epoch, step = 0, 0
if Path(state_file).exists():
    saved = torch.load(state_file, weights_only=True)
    model.load_state_dict(saved["model"])
    loader.load_state_dict(saved["loader"])
    first_epoch, step = saved["epoch"], saved["step"]
trained = torch.nn.parallel.DistributedDataParallel(model) if several else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(first_epoch, 2):
    sampler.set_epoch(epoch)
    for batch in loader:
        loss = (trained(batch["x"]) - batch["x"].sin()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        of_all = loss.detach().clone()
        if several:
            torch.distributed.all_reduce(of_all)
        step += 1
        tell(rank=rank, epoch=epoch, step=step, ids=batch["id"].tolist(), loss=float(of_all / processes))
        if epoch == 1 and step == int(stop_at):
            if rank == 0:
                state = {"model": model.state_dict(), "loader": loader.state_dict(), "epoch": epoch, "step": step}
                torch.save(state, state_file)
            break
if several:
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
