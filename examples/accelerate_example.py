"""Digits, learned with Hugging Face Accelerate from pods: checkpoints in mid-epoch, and going on from the last one.

    refill pack ./digits s3://bucket/digits        # class folders of PNG files
    torchrun --nproc-per-node 2 examples/accelerate_example.py \\
        http://refill:8000 s3://bucket/digits digits-1

Started again with the same arguments, it goes on from the checkpoint with the samples that it has not had.
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

import refill


def as_tensors(sample):
    return {"image": torch.from_numpy(sample["png"]).float().flatten() / 255, "label": sample["cls"]}


parser = argparse.ArgumentParser()
parser.add_argument("service")
parser.add_argument("dataset")
parser.add_argument("job")
parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint"))
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--save-every", type=int, default=20)
parser.add_argument("--stop-after", type=int, default=0, help="steps, as if the job was evicted then")
args = parser.parse_args()

accelerator = Accelerator(cpu=not torch.cuda.is_available())  # without a GPU it has to be told, under torchrun
set_seed(0)
dataset = refill.CacheDataset(  # after Accelerator(), which knows the ranks
    args.service, dataset=args.dataset, job=args.job, decode=True, transform=as_tensors
)
loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=refill.EpochSampler(dataset), num_workers=1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

place = args.checkpoint / "place.json"
first_epoch, steps_done = 0, 0
if place.exists():
    accelerator.load_state(args.checkpoint)
    first_epoch, steps_done = json.loads(place.read_text())

steps = 0
for epoch in range(first_epoch, args.epochs):
    loader.set_epoch(epoch)  # of the loader that prepare() returned: needed when a run goes on
    rest = accelerator.skip_first_batches(loader, steps_done) if steps_done else loader
    right = seen = 0
    for step, batch in enumerate(rest, steps_done + 1):
        logits = model(batch["image"])
        accelerator.backward(torch.nn.functional.cross_entropy(logits, batch["label"]))
        optimizer.step()
        optimizer.zero_grad()
        hits = accelerator.gather_for_metrics(logits.argmax(1) == batch["label"])
        right, seen = right + int(hits.sum()), seen + len(hits)
        if step % args.save_every == 0:
            accelerator.save_state(args.checkpoint)
            if accelerator.is_main_process:
                place.write_text(json.dumps([epoch, step]))
        steps += 1
        if steps == args.stop_after:
            raise SystemExit(f"stopped in epoch {epoch}, after step {step}")
    steps_done = 0
    accelerator.print(f"epoch {epoch}: {right / seen:.3f} of {seen} right")
accelerator.end_training()
