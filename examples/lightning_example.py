"""Lightning, on as many processes as you say, going on from its own checkpoint.

python examples/lightning_example.py URL DATASET JOB [--devices 2] [--resume checkpoints/last.ckpt]
"""

import argparse

import lightning
import torch

import refill

parser = argparse.ArgumentParser()
parser.add_argument("url", help="of the pods: http://refill:8000")
parser.add_argument("dataset", help="as the pods reach it: s3://bucket/digits")
parser.add_argument("job", help="name of this training run")
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--max-steps", type=int, default=-1)
parser.add_argument("--resume", help="checkpoint to go on from, in mid-epoch, too")
args = parser.parse_args()


def digit(sample: dict) -> tuple[torch.Tensor, int]:
    return torch.from_numpy(sample["png"]).float() / 255, sample["cls"]


class Digits(lightning.LightningDataModule):
    """Loaders are made here, in the processes that Lightning starts, when ranks are known."""

    def train_dataloader(self):
        dataset = refill.CacheDataset(args.url, dataset=args.dataset, job=args.job, decode=True, transform=digit)
        sampler = refill.EpochSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=1)
        return refill.timed(loader, dataset)  # its state goes into Lightning's checkpoints

    def val_dataloader(self):
        # A dataset of its own in earnest; here it is the same one, read in order by a job of its own.
        job = f"{args.job}-validation"
        dataset = refill.CacheDataset(args.url, dataset=args.dataset, job=job, decode=True, transform=digit)
        sampler = refill.EpochSampler(dataset, shuffle=False)
        return torch.utils.data.DataLoader(dataset, batch_size=100, sampler=sampler)


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )

    def training_step(self, batch, _):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch, _):
        images, labels = batch
        right = (self.layers(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


trainer = lightning.Trainer(
    max_epochs=3,
    max_steps=args.max_steps,
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=args.devices,
    strategy="ddp" if args.devices > 1 else "auto",
    callbacks=[lightning.pytorch.callbacks.ModelCheckpoint("checkpoints", every_n_train_steps=10, save_last=True)],
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(Model(), datamodule=Digits(), ckpt_path=args.resume)
if trainer.is_global_zero:
    print(f"after step {trainer.global_step}: accuracy {float(trainer.callback_metrics.get('accuracy', 0)):.2f}")
