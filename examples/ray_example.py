"""Ray Train over planned epochs: its workers are ranks, and its checkpoints have the place in the epoch.

    pip install 'ray[train]'
    python examples/ray_example.py URL DATASET JOB RESULTS [STOP]

It stops after STOP steps, if that is given. Started again with the same RESULTS it goes on from its last checkpoint,
also with another number of workers (WORKERS).
"""

import os
import sys
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer

import refill


def as_tensors(sample: dict[str, object]) -> dict[str, object]:
    return {"id": sample["__id__"], "x": torch.frombuffer(bytearray(sample["bin"][:10]), dtype=torch.uint8) / 255}


def train(config: dict[str, object]) -> None:
    context = ray.train.get_context()
    dataset = refill.CacheDataset(
        config["url"],
        dataset=config["dataset"],
        job=config["job"],
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        transform=as_tensors,
        resume=(saved := _saved()),
    )
    sampler = refill.EpochSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, batch_size=10, sampler=sampler, num_workers=0)
    loader = refill.timed(loader, dataset)  # instead of ray.train.torch.prepare_data_loader, which divides it once more
    if saved is not None:
        loader.load_state_dict(saved)
    model = ray.train.torch.prepare_model(torch.nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    while sampler.epoch < 2:
        for batch in loader:
            loss = model(batch["x"]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            print(f"epoch {sampler.epoch} ids {batch['id'].tolist()}", flush=True)
            if steps % 4 == 0:
                _report(loader.state_dict(), loss.item())
            if steps == config["stop"]:
                return
        sampler.set_epoch(sampler.epoch + 1)


def _saved() -> object:
    """All workers go on from the same state, that of worker 0."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return torch.load(Path(folder) / "place.pt", weights_only=False)


def _report(state: object, loss: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if ray.train.get_context().get_world_rank() > 0:
            ray.train.report({"loss": loss})
            return
        torch.save(state, Path(folder) / "place.pt")
        ray.train.report({"loss": loss}, checkpoint=ray.train.Checkpoint.from_directory(folder))


if __name__ == "__main__":
    url, dataset_url, job, results, *more = sys.argv[1:]
    workers = int(os.environ.get("WORKERS", "2"))
    ray.init(num_cpus=workers + 1, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"url": url, "dataset": dataset_url, "job": job, "stop": int(more[0]) if more else 0},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(storage_path=str(Path(results).absolute()), name=job),
    )
    trainer.fit()
