"""From nanoGPT: its train.bin, where it lies.

    refill index s3://bucket/openwebtext --tokens 1025 --stride 1024 --dtype uint16
    python examples/from_nanogpt.py http://refill:8000 DATASET run-1

Each epoch is printed; what a step of training would do stands in its place.
"""

import sys

import torch

import refill

service, url, job = sys.argv[1:]


def block(sample):
    tokens = torch.from_numpy(sample["tokens"].astype("int64"))
    return tokens[:-1], tokens[1:]


dataset = refill.CacheDataset(service, dataset=url, job=job, transform=block)
sampler = refill.EpochSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    samples = 0
    for batch in loader:
        samples += len(batch[0] if isinstance(batch, (list, tuple)) else batch["__id__"])  # and a step of training
    print(f"epoch {epoch}: {samples} samples")
dataset.end_job()
