"""A policy that learns from LeRobot's datasets where they lie: windows of 16 frames, their pictures from mp4.

    refill index s3://bucket/my-robot --windows 16,8
    python examples/robot_videos.py http://localhost:8000 run-1 s3://bucket/my-robot

A sample has 16 rows of one episode, an array for each column, and of each camera a clip: an mp4, and which of its
frames those of the rows are. torchcodec decodes it in the loader's workers; it needs FFmpeg on the machine.
"""

import sys
from typing import Any

import numpy as np
import torch
from torchcodec.decoders import VideoDecoder

import refill

STATE, ACTION = "observation.state", "action"


def as_tensors(window: dict[str, Any]) -> dict[str, Any]:
    """``(16, ...)`` of each. What LeRobot has as ``delta_timestamps`` is a choice among these."""
    cameras = sorted(name.removesuffix(".frames") for name in window if name.endswith(".frames"))
    pictures = []
    for name in cameras:
        clip = VideoDecoder(bytes(window[name]), num_ffmpeg_threads=1)
        pictures.append(clip.get_frames_at(window[f"{name}.frames"].tolist()).data)
    small = torch.nn.functional.interpolate(torch.cat(pictures, dim=1) / 255, size=(16, 16), mode="area")
    return {
        "pictures": small,
        "states": torch.from_numpy(window[STATE]).float(),
        "actions": torch.from_numpy(window[ACTION]).float(),
        "id": window["__id__"],
    }


def train(url: str, job: str, data: str) -> None:
    torch.manual_seed(0)
    dataset = refill.CacheDataset(url, dataset=data, job=job, transform=as_tensors)
    sampler = refill.EpochSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=1)
    hand = torch.nn.Sequential(torch.nn.Flatten(2), torch.nn.LazyLinear(32), torch.nn.ReLU(), torch.nn.LazyLinear(1))
    optimizer = None
    for epoch in range(6):
        sampler.set_epoch(epoch)
        seen, losses = [], []
        for batch in loader:
            loss = (hand(batch["pictures"]) - batch["actions"]).pow(2).mean()
            optimizer = optimizer or torch.optim.Adam(hand.parameters(), lr=0.01)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seen += batch["id"].tolist()
        print(f"epoch {epoch}: {len(seen)} windows, {len(set(seen))} different, loss {np.mean(losses):.5f}", flush=True)


if __name__ == "__main__":
    train(*sys.argv[1:])
