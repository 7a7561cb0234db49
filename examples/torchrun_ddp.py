"""DistributedDataParallel under torchrun, with checkpoints: after a crash it goes on with the samples it has not had.

torchrun --nproc-per-node=2 --max-restarts=3 examples/torchrun_ddp.py URL DATASET JOB [--crash-at STEP]
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist

import refill

parser = argparse.ArgumentParser()
parser.add_argument("url", help="of the pods: http://refill:8000")
parser.add_argument("dataset", help="as the pods reach it: s3://bucket/digits")
parser.add_argument("job", help="name of this training run")
parser.add_argument("--checkpoint", default="checkpoint.pt")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--crash-at", type=int, help="kill rank 1 at this step, once, to see it go on")
args = parser.parse_args()
if "RANK" not in os.environ:
    raise SystemExit("start this by torchrun: torchrun --nproc-per-node=2 examples/torchrun_ddp.py URL DATASET JOB")


def digit(sample: dict) -> tuple[torch.Tensor, int]:
    return torch.from_numpy(sample["png"]).float() / 255, sample["cls"]


if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
else:
    device = torch.device("cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank = dist.get_rank()
dataset = refill.CacheDataset(args.url, dataset=args.dataset, job=args.job, decode=True, transform=digit)
sampler = refill.EpochSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=1)
loader = refill.timed(loader, dataset)  # made once, for all epochs; it has the state

model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
model = torch.nn.parallel.DistributedDataParallel(model.to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

step, samples = 0, 0  # of all epochs; of this rank in this one
if os.path.exists(args.checkpoint):
    # Ranks go through an epoch in step, so that the state of rank 0 is right for all.
    saved = torch.load(args.checkpoint, weights_only=True, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    step, samples = saved["step"], saved["samples"]
    print(f"rank {rank} goes on in epoch {sampler.epoch} after step {step}", flush=True)

for epoch in range(sampler.epoch, args.epochs):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step, samples = step + 1, samples + len(labels)
        if rank == 0 and step % 10 == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            torch.save(saved | {"step": step, "samples": samples}, args.checkpoint + ".new")
            os.replace(args.checkpoint + ".new", args.checkpoint)
        if step == args.crash_at and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    total = torch.tensor(samples, device=device)
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: {int(total)} samples on {dist.get_world_size()} ranks, loss {loss:.3f}", flush=True)
    samples = 0

dist.destroy_process_group()
