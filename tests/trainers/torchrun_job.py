"""DDP and FSDP2 under torchrun, which starts all ranks again when one is killed. Each goes on from its checkpoint.

torchrun --max-restarts=2 torchrun_job.py URL DATASET JOB FOLDER
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.checkpoint
from lines import tell
from torch.distributed.fsdp import fully_shard

import refill

url, dataset_url, job, folder = sys.argv[1:]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.distributed.init_process_group("gloo")
rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
SAVED_AT = 400 // 16 // processes // 2


def first_byte(sample: dict[str, Any]) -> dict[str, Any]:
    return {"id": sample["__id__"], "x": torch.tensor([sample["bin"][0] / 256])}


def train(kind: str, wrap: Callable[[torch.nn.Module], torch.nn.Module], killed_in: int, killed_rank: int) -> None:
    dataset = refill.CacheDataset(url, dataset=dataset_url, job=f"{job}-{kind}", transform=first_byte)
    sampler = refill.EpochSampler(dataset)
    loader = refill.timed(torch.utils.data.DataLoader(dataset, 16, sampler=sampler, num_workers=1), dataset)
    model = wrap(torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    # FSDP2's own form of checkpoint: each rank writes its part of the model, one of them the rest.
    parts = {"model": model, "loader": loader}
    saved = Path(folder, kind)
    if saved.with_suffix(".done").exists():
        torch.distributed.checkpoint.load(parts, checkpoint_id=saved)  # type: ignore[attr-defined]
    step = 0
    for epoch in range(sampler.epoch, 2):
        sampler.set_epoch(epoch)
        for batch in loader:
            model(batch["x"]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            tell(kind=kind, attempt=attempt, rank=rank, epoch=epoch, step=step, ids=batch["id"].tolist())
            if attempt == killed_in and step == SAVED_AT:
                torch.distributed.checkpoint.save(parts, checkpoint_id=saved)  # type: ignore[attr-defined]
                saved.with_suffix(".done").touch()
            if attempt == killed_in and step == SAVED_AT + 2 and rank == killed_rank:
                os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.checkpoint.save(parts, checkpoint_id=saved)  # type: ignore[attr-defined]


train("ddp", torch.nn.parallel.DistributedDataParallel, killed_in=0, killed_rank=processes - 1)
train("fsdp2", fully_shard, killed_in=1, killed_rank=0)
torch.distributed.destroy_process_group()
