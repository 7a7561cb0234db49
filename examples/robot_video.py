"""Windows of video: LeRobot's layout with mp4, cut where frames can be decoded alone, and a policy that learns of them.

    pip install av torchcodec    # torchcodec needs FFmpeg's libraries, too
    python examples/robot_video.py record /tmp/robot           # Parquet and mp4, as LeRobot writes them
    python examples/robot_video.py cut /tmp/robot /tmp/windows 16
    refill pack /tmp/windows file:///tmp/robot-windows
    python examples/robot_video.py train http://localhost:8000 run-1 file:///tmp/robot-windows

A sample is 16 frames in a row: an mp4 of their packets, copied and not encoded again, and the rows of the Parquet file.
Windows of an episode lie beside each other in the store, so pods read them together, each once an epoch.
"""

import io
import sys
from pathlib import Path

import numpy as np
import torch

import refill

EPISODES, FRAMES, RATE, GROUP = 8, 64, 10, 2
CAMERA = "observation.images.top"


def record(folder: Path) -> None:
    """An arm of two joints that goes to where a light is; the video shows the light. Each second frame is a key frame,
    as LeRobot encodes them."""
    import av
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    data, videos = folder / "data" / "chunk-000", folder / "videos" / "chunk-000" / CAMERA
    for each in (data, videos):
        each.mkdir(parents=True)
    for episode in range(EPISODES):
        light, state, rows = random.random(2), random.random(2), []
        with av.open(str(videos / f"episode_{episode:06}.mp4"), "w") as video:
            stream = video.add_stream("libx264", rate=RATE, options={"bf": "0", "g": str(GROUP)})
            stream.width = stream.height = 32
            stream.pix_fmt = "yuv420p"
            for frame in range(FRAMES):
                picture = np.zeros((32, 32, 3), np.uint8)
                row, column = (28 * light).astype(int)
                picture[row : row + 4, column : column + 4] = 255
                video.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
                action = 0.2 * (light - state)
                about = {"timestamp": frame / RATE, "frame_index": frame, "episode_index": episode}
                rows.append({"observation.state": state.tolist(), "action": action.tolist()} | about)
                state = state + action
            video.mux(stream.encode())
        pq.write_table(pa.Table.from_pylist(rows), data / f"episode_{episode:06}.parquet")


def cut(folder: Path, windows: Path, length: int) -> None:
    """Files of one sample have one name: ``refill pack`` puts them together."""
    import av
    import pyarrow.parquet as pq

    windows.mkdir(parents=True)
    for table in sorted(folder.glob("data/*/*.parquet")):
        rows = pq.read_table(table).to_pylist()
        source = av.open(str(folder / "videos" / table.parent.name / CAMERA / f"{table.stem}.mp4"))
        packets = [packet for packet in source.demux(source.streams.video[0]) if packet.size]
        for first in range(0, len(rows) - length + 1, length):
            of_window = packets[first : first + length]
            if not of_window[0].is_keyframe:
                raise SystemExit(f"frame {first} of {table.stem} is no key frame: take a multiple of {GROUP}")
            piece, begins = io.BytesIO(), of_window[0].dts
            with av.open(piece, "w", format="mp4") as video:
                stream = video.add_stream_from_template(source.streams.video[0])
                for packet in of_window:
                    packet.pts, packet.dts, packet.stream = packet.pts - begins, packet.dts - begins, stream
                    video.mux(packet)
            name = windows / f"{table.stem}_{first:06}"
            name.with_suffix(".mp4").write_bytes(piece.getvalue())
            here = rows[first : first + length]
            for what, column in (("state", "observation.state"), ("action", "action")):
                np.save(f"{name}.{what}.npy", np.array([row[column] for row in here], np.float32))


def as_tensors(window: dict[str, object]) -> dict[str, object]:
    """``(length, ...)`` of each."""
    from torchcodec.decoders import VideoDecoder

    frames = VideoDecoder(bytes(window["mp4"]))
    return {
        "pictures": frames[:].float() / 255,
        "states": torch.from_numpy(np.load(io.BytesIO(window["state.npy"]))),
        "actions": torch.from_numpy(np.load(io.BytesIO(window["action.npy"]))),
        "id": window["__id__"],
    }


def train(url: str, job: str, data: str) -> None:
    torch.manual_seed(0)
    dataset = refill.CacheDataset(url, dataset=data, job=job, transform=as_tensors)
    sampler = refill.EpochSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=1)
    eye = torch.nn.Sequential(torch.nn.Flatten(2), torch.nn.Linear(3 * 32 * 32, 16), torch.nn.ReLU())
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
    command, *given = sys.argv[1:]
    if command == "record":
        record(Path(given[0]))
    elif command == "cut":
        cut(Path(given[0]), Path(given[1]), int(given[2]))
    else:
        train(*given)
