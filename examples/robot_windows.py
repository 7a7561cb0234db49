"""Windows of episodes, in LeRobot's layout: a policy that learns from 16 frames at a time.

    python examples/robot_windows.py prepare /tmp/robot
    refill index /tmp/robot/data --windows 16,8
    python examples/robot_windows.py train http://localhost:8000 run-1 file:///tmp/robot/data

An episode is a Parquet file with a row for each frame: state, action, a picture, and which episode and frame it is. A
sample is a window of 16 frames of one episode, and the next begins 8 frames on. Pods read each frame once an epoch.
"""

import io
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

import refill

EPISODES, FRAMES = 12, 60


def prepare(folder: Path) -> None:
    """An arm of two joints that goes to where a light is; the picture shows the light."""
    random = np.random.default_rng(0)
    below = folder / "data" / "chunk-000"
    below.mkdir(parents=True, exist_ok=True)
    for episode in range(EPISODES):
        light, state, rows = random.random(2), random.random(2), []
        for frame in range(FRAMES):
            action = 0.2 * (light - state)
            picture = np.zeros((16, 16, 3), np.uint8)
            picture[tuple((15 * light).astype(int))] = 255
            png = io.BytesIO()
            Image.fromarray(picture).save(png, format="PNG")
            row = {"observation.state": state.tolist(), "action": action.tolist()}
            row |= {"observation.image": {"bytes": png.getvalue(), "path": f"{frame}.png"}}
            rows.append(row | {"timestamp": frame / 10, "frame_index": frame, "episode_index": episode})
            state = state + action
        pq.write_table(pa.Table.from_pylist(rows), below / f"episode_{episode:06}.parquet")


def as_tensors(window: dict[str, object]) -> dict[str, object]:
    """``(16, ...)`` of each; what LeRobot has as ``delta_timestamps`` is a choice among these."""
    pictures = [np.asarray(Image.open(io.BytesIO(png))) for png in window["observation.image"]]
    return {
        "pictures": torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255,
        "states": torch.from_numpy(window["observation.state"]).float(),
        "actions": torch.from_numpy(window["action"]).float(),
        "id": window["__id__"],
    }


def train(url: str, job: str, data: str) -> None:
    torch.manual_seed(0)
    dataset = refill.CacheDataset(url, dataset=data, job=job, transform=as_tensors)
    sampler = refill.EpochSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, batch_size=12, sampler=sampler, num_workers=1)
    eye = torch.nn.Sequential(torch.nn.Flatten(2), torch.nn.Linear(768, 16), torch.nn.ReLU())
    hand = torch.nn.Sequential(torch.nn.Linear(18, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.Adam([*eye.parameters(), *hand.parameters()], lr=0.01)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        seen, losses = [], []
        for batch in loader:
            actions = hand(torch.cat([eye(batch["pictures"]), batch["states"]], dim=2))
            loss = (actions - batch["actions"]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seen += batch["id"].tolist()
        print(f"epoch {epoch}: {len(seen)} windows, {len(set(seen))} different, loss {np.mean(losses):.5f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
    else:
        train(*sys.argv[2:])
