"""Ray Train: workers on a Ray cluster, checkpoints reported to it, going on after one of them died.

python examples/ray_example.py URL DATASET JOB STORAGE [--workers 2] [--crash-at STEP]
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig

import refill


def digit(sample: dict) -> tuple[torch.Tensor, int]:
    return torch.from_numpy(sample["png"]).float() / 255, sample["cls"]


def train(config: dict) -> None:
    """In each worker; its rank and their number are those of the process group that Ray has made."""
    rank = ray.train.get_context().get_world_rank()
    dataset = refill.CacheDataset(
        config["url"], dataset=config["dataset"], job=config["job"], decode=True, transform=digit
    )
    sampler = refill.EpochSampler(dataset)
    batches = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=1)
    loader = refill.timed(batches, dataset)  # made once, for all epochs; it has the state

    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step, samples = 0, 0  # of all epochs; of this rank in this one
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step, samples = saved["step"], saved["samples"]
        print(f"rank {rank} goes on in epoch {sampler.epoch} after step {step}", flush=True)

    for epoch in range(sampler.epoch, config["epochs"]):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step, samples = step + 1, samples + len(labels)
            if step % 10 == 0:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                saved |= {"loader": loader.state_dict(), "step": step, "samples": samples}
                with tempfile.TemporaryDirectory() as folder:
                    torch.save(saved, Path(folder) / "state.pt")
                    # Ranks go through an epoch in step, so that the state of rank 0 is right for all.
                    kept = Checkpoint.from_directory(folder) if rank == 0 else None
                    ray.train.report({"step": step, "loss": loss.item()}, checkpoint=kept)
            if step == config["crash_at"] and rank == 1 and checkpoint is None:
                os.kill(os.getpid(), signal.SIGKILL)
        total = torch.tensor(samples)
        torch.distributed.all_reduce(total)
        if rank == 0:
            ranks = torch.distributed.get_world_size()
            print(f"epoch {epoch}: {int(total)} samples on {ranks} ranks, loss {loss:.3f}", flush=True)
        samples = 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url", help="of the pods: http://refill:8000")
    parser.add_argument("dataset", help="as the pods reach it: s3://bucket/digits")
    parser.add_argument("job", help="name of this training run")
    parser.add_argument("storage", help="where checkpoints go, which all machines reach")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--crash-at", type=int, help="kill rank 1 at this step, once, to see it go on")
    args = parser.parse_args()
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(name=args.job, storage_path=args.storage, failure_config=FailureConfig(max_failures=3)),
    )
    print(f"ended: {trainer.fit().metrics}")
