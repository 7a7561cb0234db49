"""Lightning, strategy ddp: each CASE trains, is stopped behind a checkpoint in mid-epoch, the last one by SIGKILL.
Run again with resumed, each goes on by fit(ckpt_path=...).

    lightning_job.py URL DATASET JOB FOLDER {first|resumed} CASE...
    CASE: {timed|iterable|stateful|plain|ended|last|validated}-WORKERS
"""

import os
import signal
import sys
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lines import tell
from torchdata.stateful_dataloader import StatefulDataLoader

import refill

warnings.filterwarnings("ignore")
url, dataset_url, job, folder, phase, *cases = sys.argv[1:]
processes = int(os.environ.get("WORLD_SIZE", "1"))
BATCH = 16
STEPS = -(-400 // (BATCH * processes))


def saved_at(case: str) -> int:
    """After how many steps: in mid-epoch 1, but at its end if the case says so."""
    return 2 * STEPS if case.startswith(("ended", "last", "validated")) else STEPS + STEPS // 2


class Stopped(Exception):
    pass


def first_byte(sample: dict[str, object]) -> dict[str, object]:
    return {"id": sample["__id__"], "x": torch.tensor([sample["bin"][0] / 256])}


class Model(lightning.LightningModule):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        step = self.trainer.global_step + 1
        tell(
            case=self.case,
            phase=phase,
            rank=self.global_rank,
            epoch=self.current_epoch,
            step=step,
            kind="train",
            ids=batch["id"].tolist(),
        )
        if phase == "first" and self.case != "limited" and step == saved_at(self.case) + 3:
            self.trainer.strategy.barrier()
            if self.case == cases[-1]:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Stopped
        return self.layer(batch["x"]).sum()

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        tell(
            case=self.case,
            phase=phase,
            rank=self.global_rank,
            epoch=self.current_epoch,
            kind="sanity" if self.trainer.sanity_checking else "validation",
            ids=batch["id"].tolist(),
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


class SetEpoch(lightning.Callback):
    """Lightning tells samplers of a new epoch, and no iterable dataset."""

    def __init__(self, dataset: refill.CacheIterableDataset) -> None:
        self.dataset = dataset

    def on_train_epoch_start(self, trainer: lightning.Trainer, model: lightning.LightningModule) -> None:
        self.dataset.set_epoch(trainer.current_epoch)


def fit(case: str, **settings: object) -> None:
    form, workers = case.split("-") if "-" in case else ("plain", "2")
    place = {"dataset": dataset_url, "job": f"{job}-{case}", "rank": RANK, "world_size": processes}
    if form == "iterable":
        train = refill.CacheIterableDataset(url, transform=first_byte, batch_size=BATCH, **place)
        loader = torch.utils.data.DataLoader(train, batch_size=BATCH, num_workers=int(workers))
    else:
        train = refill.CacheDataset(url, transform=first_byte, **place)
        make = StatefulDataLoader if form == "stateful" else torch.utils.data.DataLoader
        loader = make(train, batch_size=BATCH, sampler=refill.EpochSampler(train), num_workers=int(workers))
    if form in ("timed", "iterable"):
        loader = refill.timed(loader, train)
    loaders = [loader]
    if form == "validated" or "limit_train_batches" in settings:
        held_out = refill.CacheDataset(
            url,
            dataset=dataset_url,
            job=f"{job}-{case}-validation",
            transform=first_byte,
            rank=RANK,
            world_size=processes,
        )
        order = refill.EpochSampler(held_out, shuffle=False)
        loaders.append(torch.utils.data.DataLoader(held_out, batch_size=BATCH, sampler=order, num_workers=1))
    often = {"every_n_epochs": 1} if form in ("ended", "validated") else {"every_n_train_steps": saved_at(case)}
    checkpoint = ModelCheckpoint(f"{folder}/{case}", filename="{step}", save_top_k=-1, **often)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        callbacks=[checkpoint, *([SetEpoch(train)] if form == "iterable" else [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    saved = f"{folder}/{case}/step={saved_at(case)}.ckpt" if phase == "resumed" and "-" in case else None
    trainer.fit(Model(case), *loaders, ckpt_path=saved)


RANK = int(os.environ.get("RANK", "0"))
if phase == "first":
    fit("limited", limit_train_batches=0.5)
for case in cases:
    try:
        fit(case)
    except Stopped:
        pass
    except refill.errors.RefillError as error:
        if phase == "first":
            raise
        tell(case=case, phase=phase, rank=RANK, kind="error", error=f"{type(error).__name__}: {error}")
