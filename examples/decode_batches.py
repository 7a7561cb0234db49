"""Pictures decoded a batch at a time, in the training process: by nvJPEG on a GPU, or by Pillow in threads.

    torchrun --nproc-per-node=2 examples/decode_batches.py URL DATASET JOB [--member jpg]

Threads ask ahead, and no worker process is started: a batch comes as a list of views of the buffers that the pods'
answers were read into. torchvision's decode_jpeg takes such a list, and decodes it on the GPU. Pillow lets other
threads run while it decodes.
"""

import argparse
import io
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

import refill

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("url")
parser.add_argument("dataset")
parser.add_argument("job")
parser.add_argument("--member", default="png", help="of a sample, the picture: jpg goes to the GPU, if there is one")
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()
if "RANK" not in os.environ:
    parser.error("start this by torchrun: torchrun --nproc-per-node=2 examples/decode_batches.py URL DATASET JOB")
dist.init_process_group("gloo")  # what ranks exchange here lies in memory of the CPU
is_on_gpu = torch.cuda.is_available() and args.member == "jpg"
threads = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // dist.get_world_size()))


def decoded(views: list[np.ndarray]) -> list[torch.Tensor]:
    """``(channels, height, width)`` uint8 of each."""
    if is_on_gpu:
        from torchvision.io import decode_jpeg

        return decode_jpeg([torch.from_numpy(view) for view in views], device="cuda")
    return list(threads.map(decoded_by_pillow, views))


def decoded_by_pillow(view: np.ndarray) -> torch.Tensor:
    picture = np.array(Image.open(io.BytesIO(view)).convert("RGB"))
    return torch.from_numpy(picture).permute(2, 0, 1)


reader = refill.iterate(
    args.url,
    dataset=args.dataset,
    job=args.job,
    batch_size=64,
    decode={args.member: refill.as_view},
    as_tuple=(args.member, "__id__"),
)
for epoch in range(args.epochs):
    reader.set_epoch(epoch)
    counts = torch.zeros(2, dtype=torch.int64)
    for views, ids in reader:
        pictures = decoded(views)  # of any sizes; your transforms, on the same device, make one tensor of them
        counts += torch.tensor([len(ids), sum(picture.numel() for picture in pictures)])
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        where = "the GPU" if is_on_gpu else "the CPU"
        print(f"epoch {epoch}: {counts[0]} pictures of {counts[1]} values, decoded on {where}", flush=True)
dist.destroy_process_group()
