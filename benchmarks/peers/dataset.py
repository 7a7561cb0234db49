"""What is the dataset? The same samples in the same order, written to the store as each loader wants them.

    python -m peers.dataset STORE_URL FOLDER SAMPLES

A sample is its id (8 bytes) and random bytes: nothing compresses. Sizes are log-normal with a mean of 110 KB, about
what ImageNet's JPEGs have. Everyone's shards are small beside the dataset, as ImageNet's usual ones are: 4 MB here for
those that hold whole shards in their cache; 32 MB for refill, which reads ranges of them. In the store:

- ``objects/00000000.jpg``: an object a sample, for boto3 and s3torchconnector;
- ``tars/``: WebDataset shards of 4 MB;
- ``blobs/``: the same samples in shards of 32 MB or a little more, each of a whole number of chunks, as ``refill pack``
  makes them, and the index of ``refill index``;
- ``mds/``: MosaicML's MDS shards of 4 MB;
- ``litdata/``: LitData's chunks of 4 MB.

Each format is written by its own library where it has one.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import tarfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from peers.setting import ACCESS_KEY, BUCKET, SECRET_KEY

__all__ = ["MEAN_BYTES", "sample_id", "sizes"]

MEAN_BYTES = 110_000
SIGMA = 0.5
SHARD_BYTES = 4_000_000
BLOB_BYTES, BLOB_SAMPLES = 32_000_000, 64
"""At least so many bytes, and a multiple of so many samples."""


def sizes(samples: int) -> np.ndarray:
    """Bytes of each sample ``(samples,)``."""
    drawn = np.random.default_rng(1).lognormal(np.log(MEAN_BYTES) - SIGMA**2 / 2, SIGMA, samples)
    return np.maximum(drawn, 1000).astype(np.int64)


def contents(samples: int) -> Iterator[bytes]:
    generator = np.random.default_rng(2)
    for number, size in enumerate(sizes(samples).tolist()):
        yield number.to_bytes(8, "little") + generator.bytes(size - 8)


def sample_id(content: bytes) -> int:
    return int.from_bytes(content[:8], "little")


def main(store_url: str, folder: Path, samples: int) -> None:
    source = folder / "objects"
    source.mkdir(parents=True)
    for number, content in enumerate(contents(samples)):
        (source / f"{number:08}.jpg").write_bytes(content)
    paths = sorted(source.iterdir())
    client = _s3(store_url)
    client.create_bucket(Bucket=BUCKET)
    _upload(client, source, "objects")
    for prefix, shard_bytes, multiple in (("tars", SHARD_BYTES, 1), ("blobs", BLOB_BYTES, BLOB_SAMPLES)):
        _write_tars(paths, folder / prefix, shard_bytes, multiple)
        _upload(client, folder / prefix, prefix)
        shutil.rmtree(folder / prefix)
    index = [sys.executable, "-m", "refill_service.cli", "index", f"s3://{BUCKET}/blobs", "--quiet"]
    subprocess.run([*index, "--endpoint-url", store_url], check=True)
    _write_mds(paths, folder / "mds")
    _upload(client, folder / "mds", "mds")
    _write_litdata(paths, folder / "litdata")
    _upload(client, folder / "litdata", "litdata")
    shutil.rmtree(folder)


def _write_tars(paths: list[Path], folder: Path, shard_bytes: int, multiple: int) -> None:
    folder.mkdir()
    left = deque(paths)
    for shard in itertools.count():
        if not left:
            break
        with tarfile.open(folder / f"shard-{shard:06}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            while left and tar.offset < shard_bytes:
                for path in (left.popleft() for _ in range(min(multiple, len(left)))):
                    tar.add(path, path.name)


def _write_mds(paths: list[Path], folder: Path) -> None:
    from peers.mosaicml import streaming

    with streaming.MDSWriter(out=str(folder), columns={"jpg": "bytes"}, size_limit=SHARD_BYTES) as writer:
        for path in paths:
            writer.write({"jpg": path.read_bytes()})


def _write_litdata(paths: list[Path], folder: Path) -> None:
    import litdata

    inputs = [str(path) for path in paths]
    litdata.optimize(_litdata_sample, inputs, str(folder), chunk_bytes=SHARD_BYTES, num_workers=1, verbose=False)


def _litdata_sample(path: str) -> dict[str, bytes]:
    return {"jpg": Path(path).read_bytes()}


def _upload(client: Any, folder: Path, prefix: str) -> None:
    paths = [path for path in folder.iterdir() if path.is_file()]
    with ThreadPoolExecutor(4) as threads:
        for _ in threads.map(
            lambda path: client.put_object(Bucket=BUCKET, Key=f"{prefix}/{path.name}", Body=path.read_bytes()), paths
        ):
            pass
    print(f"{prefix}: {len(paths)} objects", flush=True)


def _s3(store_url: str) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=store_url,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
