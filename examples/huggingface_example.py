"""Digits, learned with Hugging Face's Trainer from pods: checkpoints in mid-epoch, and going on from the last one.

    refill pack ./digits s3://bucket/digits        # class folders of PNG files
    torchrun --nproc-per-node 2 examples/huggingface_example.py \\
        http://refill:8000 s3://bucket/digits digits-1

Started again with the same arguments, it goes on from the last checkpoint with the samples that it has not had.
"""

import argparse
import os

import torch
import transformers

import refill


class CacheTrainer(transformers.Trainer):
    """Trainer, with refill's sampler in place of its own."""

    def _get_train_sampler(self, train_dataset=None):
        return refill.EpochSampler(self.train_dataset)


class Digits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def forward(self, image, labels=None):
        logits = self.layers(image)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def as_tensors(sample):
    return {"image": torch.from_numpy(sample["png"]).float().flatten() / 255, "labels": sample["cls"]}


parser = argparse.ArgumentParser()
parser.add_argument("service")
parser.add_argument("dataset")
parser.add_argument("job")
parser.add_argument("--output", default="output")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--save-steps", type=int, default=20)
parser.add_argument("--stop-after", type=int, default=0, help="steps, as if the job was evicted then")
args = parser.parse_args()


class Stop(transformers.TrainerCallback):
    def on_step_end(self, arguments, state, control, **_):
        if state.global_step == args.stop_after:
            raise SystemExit(f"stopped after step {state.global_step}")


arguments = transformers.TrainingArguments(
    output_dir=args.output,
    num_train_epochs=args.epochs,
    per_device_train_batch_size=32,
    learning_rate=4e-3,
    save_steps=args.save_steps,
    dataloader_num_workers=1,
    report_to=[],
)
# After TrainingArguments, which start the processes' group, so that the ranks are known.
dataset = refill.CacheDataset(args.service, dataset=args.dataset, job=args.job, decode=True, transform=as_tensors)
trainer = CacheTrainer(Digits(), arguments, train_dataset=dataset, callbacks=[Stop()])
os.makedirs(args.output, exist_ok=True)
trainer.train(resume_from_checkpoint=transformers.trainer_utils.get_last_checkpoint(args.output))
