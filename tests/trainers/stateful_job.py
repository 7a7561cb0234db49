"""torchdata's StatefulDataLoader in one process or several, saved by rank 0 alone, killed in mid-epoch, resumed.

stateful_job.py URL DATASET JOB FILE WORKERS KILL_AT
"""

import os
import signal
import sys

import torch
import torch.distributed
from lines import tell
from torchdata.stateful_dataloader import StatefulDataLoader

import refill

url, dataset_url, job, path, workers, kill_at = sys.argv[1:]
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
dataset = refill.CacheDataset(url, dataset=dataset_url, job=job)
sampler = refill.EpochSampler(dataset)
loader = StatefulDataLoader(
    dataset, batch_size=8, sampler=sampler, num_workers=int(workers), collate_fn=lambda samples: samples
)
first_epoch = 0
resumed = os.path.exists(path)
if resumed:
    saved = torch.load(path, weights_only=False)
    first_epoch = saved["epoch"]
    loader.load_state_dict(saved["loader"])
step = 0
for epoch in range(first_epoch, 2):
    sampler.set_epoch(epoch)
    for batch in loader:
        step += 1
        tell(rank=dataset.rank, epoch=epoch, step=step, resumed=resumed, ids=[sample["__id__"] for sample in batch])
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if step == int(kill_at) - 3 and dataset.rank == 0 and not resumed:
            torch.save({"epoch": epoch, "step": step, "loader": loader.state_dict()}, path)
        if step == int(kill_at) and not resumed:
            os.kill(os.getpid(), signal.SIGKILL)
