"""What does a decoded picture cost: by worker processes, or from views, with nvJPEG where there is a GPU?

    make bench-decode
    python benchmarks/decoded_pictures.py --pictures 4096 --workers 8

JPEG pictures of 500 x 375 from one pod that has all of them in memory, in batches of 256. Where there is a GPU,
pictures end in its memory. *workers* is a DataLoader whose worker processes decode by Pillow. *views* is
``refill.iterate``: threads of the training process ask ahead, and a batch is a list of views, which nvJPEG decodes;
without a GPU Pillow does, in as many threads as there are workers. *workers, bytes* has worker processes that fetch,
and hand on encoded bytes. *decoder alone* decodes pictures that lie in memory, and in pinned memory: no way of
loading can be faster. CPU is of the training process with its workers, and the pod's is beside it. Rounds alternate;
medians.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from PIL import Image
from pod_throughput import cpu_of_pod
from torch.utils.data import DataLoader

import refill
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

PICTURES, WORKERS, ROUNDS, BATCH = 8_192, 8, 3, 256
WIDTH, HEIGHT, DIFFERENT = 500, 375, 256
HAS_GPU = torch.cuda.is_available()
ON = "nvJPEG" if HAS_GPU else "Pillow"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=PICTURES)
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes, and threads of Pillow")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="refill-bench-") as temporary:
        folder = Path(temporary)
        pictures, logs = _written(folder, args.pictures), folder / "logs"
        logs.mkdir()
        dataset = (folder / "store").as_uri()
        packed = asyncio.run(pack(str(pictures), dataset)).blob_bytes
        print(f"{machine()}, {torch.cuda.get_device_name() if HAS_GPU else 'no GPU'}, {args.workers} workers")
        print(f"{args.pictures:,} pictures of {packed / args.pictures:,.0f} bytes")
        of_a_job = 2 * packed + (256 << 20)
        settings = {"dataset": dataset, "memory_bytes": of_a_job, "as_tuple": ("jpg",)}
        with LocalCluster(1, logs, {"memory_bytes": 4 * of_a_job}) as cluster:
            encoded = [np.frombuffer(path.read_bytes(), np.uint8) for path in sorted(pictures.iterdir())[:DIFFERENT]]
            _compare(_Ways(cluster.pod_urls[0], settings, encoded, args), cluster.processes[0].pid, args)


def _compare(ways: _Ways, pod: int, args: argparse.Namespace) -> None:
    print(f"{'':32} {'pictures/s':>11} {'to alone':>9} {'CPU s / 1,000':>14} {'of the pod':>11}")
    found: dict[str, list[tuple[float, float, float]]] = {}
    for number in range(1 + args.rounds):
        for name, way in ways.named().items():
            began, cpu, of_pod = time.perf_counter(), _own_cpu(), cpu_of_pod(pod)
            count = sum(way(number))
            if HAS_GPU:
                torch.cuda.synchronize()
            row = (count / (time.perf_counter() - began), _own_cpu() - cpu, cpu_of_pod(pod) - of_pod)
            assert count == args.pictures, f"{name}: {count:,} pictures in place of {args.pictures:,}"
            if number:  # the first one fills the pod's memory
                found.setdefault(name, []).append(row)
    alone = statistics.median(row[0] for row in found[f"decoder alone, {ON}"])
    for name, rows in found.items():
        speed, cpu, of_pod = (statistics.median(column) for column in zip(*rows, strict=True))
        parts = f"{speed / alone:9.2f} {1000 * cpu / args.pictures:14.2f} {1000 * of_pod / args.pictures:11.2f}"
        print(f"{name:32} {speed:11,.0f} {parts}", flush=True)


class _Ways:
    """From an epoch's number to how many pictures each batch had."""

    def __init__(self, url: str, settings: dict[str, Any], encoded: list[Any], args: argparse.Namespace) -> None:
        self._url, self._settings, self._args = url, settings, args
        repeated = [torch.from_numpy(encoded[number % len(encoded)].copy()) for number in range(args.pictures)]
        self._batches = [repeated[first : first + BATCH] for first in range(0, len(repeated), BATCH)]
        self._pinned = [[each.pin_memory() for each in batch] for batch in self._batches] if HAS_GPU else []
        self._threads = ThreadPoolExecutor(args.workers)
        self._views = refill.iterate(
            url,
            job="views",
            batch_size=BATCH,
            decode={"jpg": refill.as_view},
            **self._settings,
        )
        self._by_workers = self._loader("workers", decoded_by_pillow, torch.stack)
        self._of_bytes = self._loader("bytes", None, list)

    def named(self) -> dict[str, Callable[[int], Iterator[int]]]:
        ways: dict[str, Callable[[int], Iterator[int]]] = {
            f"decoder alone, {ON}": lambda epoch: self._alone(self._batches),
            f"decoder alone, {ON}, pinned": lambda epoch: self._alone(self._pinned),
            "workers, Pillow": self._decoded_by_workers,
            f"views, {ON}": self._from_views,
            f"workers, bytes, {ON}": self._from_bytes,
        }
        return ways if HAS_GPU else {name: way for name, way in ways.items() if "pinned" not in name}

    def _loader(self, job: str, decode: Any, collate: Callable[[list[Any]], Any]) -> DataLoader[Any]:
        samples = refill.CacheDataset(self._url, job=job, decode=decode and {"jpg": decode}, **self._settings)
        return DataLoader(
            samples,
            batch_size=BATCH,
            sampler=refill.EpochSampler(samples),
            num_workers=self._args.workers,
            collate_fn=_Collate(collate),
            pin_memory=HAS_GPU and decode is not None,
        )

    def _alone(self, batches: list[list[torch.Tensor]]) -> Iterator[int]:
        return (len(self._decoded(batch)) for batch in batches)

    def _from_views(self, epoch: int) -> Iterator[int]:
        self._views.set_epoch(epoch)
        for (views,) in self._views:
            yield len(self._decoded([torch.from_numpy(view) for view in views]))

    def _decoded_by_workers(self, epoch: int) -> Iterator[int]:
        self._by_workers.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for pictures in self._by_workers:
            yield len(pictures.to("cuda", non_blocking=True) if HAS_GPU else pictures)

    def _from_bytes(self, epoch: int) -> Iterator[int]:
        self._of_bytes.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for pictures in self._of_bytes:
            yield len(self._decoded([torch.frombuffer(bytearray(picture), dtype=torch.uint8) for picture in pictures]))

    def _decoded(self, pictures: list[torch.Tensor]) -> list[torch.Tensor]:
        if HAS_GPU:
            from torchvision.io import decode_jpeg

            return decode_jpeg(pictures, device="cuda")  # type: ignore[no-any-return]
        return list(self._threads.map(decoded_by_pillow, pictures))


class _Collate:
    """Of samples that are tuples of one, ``collate`` of what is in them."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[tuple[Any]]) -> Any:
        return self._collate([picture for (picture,) in samples])


def decoded_by_pillow(data: bytes | memoryview | torch.Tensor) -> torch.Tensor:
    """``(channels, height, width)``, uint8."""
    encoded = io.BytesIO(data.numpy().tobytes() if isinstance(data, torch.Tensor) else data)
    return torch.from_numpy(np.array(Image.open(encoded).convert("RGB"))).permute(2, 0, 1)


def _written(folder: Path, count: int) -> Path:
    """A folder of pictures, of which some are alike: smooth, with noise for some 110 KB."""
    pictures, generator, encoded = folder / "pictures", np.random.default_rng(1), []
    pictures.mkdir()
    for _ in range(min(DIFFERENT, count)):
        small = Image.fromarray(generator.integers(0, 256, (HEIGHT // 25, WIDTH // 25, 3), dtype=np.uint8))
        smooth = np.asarray(small.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
        noisy = smooth + generator.integers(-24, 25, smooth.shape, dtype=np.int16)
        buffer = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(buffer, "jpeg", quality=90)
        encoded.append(buffer.getvalue())
    for number in range(count):
        (pictures / f"{number:06}.jpg").write_bytes(encoded[number % len(encoded)])
    return pictures


def _own_cpu() -> float:
    own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in own)


if __name__ == "__main__":
    main()
