"""From torchvision's ImageFolder: class folders, packed into tars.

    refill pack /data/imagenet/train s3://bucket/imagenet
    python examples/from_imagefolder.py http://refill:8000 DATASET run-1

Each epoch is printed; what a step of training would do stands in its place.
"""

import sys

import torch

import refill

service, url, job = sys.argv[1:]


def transform(sample):
    return sample | {"jpg": torch.from_numpy(sample["jpg"]).permute(2, 0, 1).float() / 255}


dataset = refill.CacheDataset(service, dataset=url, job=job, decode=True, transform=transform, as_tuple=("jpg", "cls"))
sampler = refill.EpochSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    samples = 0
    for batch in loader:
        samples += len(batch[0] if isinstance(batch, (list, tuple)) else batch["__id__"])  # and a step of training
    print(f"epoch {epoch}: {samples} samples")
dataset.end_job()
