"""What does one loader of orders.py do? It reads epochs as fast as it computes them, and notes when each ended.

Started with one argument, JSON. It writes the seconds of the machine's monotonic clock at which each epoch began and
ended, the store's counts then, and the ids of its samples, to ``output``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import botocore.config
import numpy as np
from peers.store_counts import open_counts

Ids = Iterable["np.ndarray[Any, Any] | list[int]"]


class Objects:
    """Each sample with a GET; its first bytes are its id. A random-access source for grain, too."""

    def __init__(self, num_samples: int, bucket: str, threads: int) -> None:
        config = botocore.config.Config(max_pool_connections=threads)
        self._client = boto3.client("s3", config=config)
        self._bucket, self._num_samples = bucket, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, sample: Any) -> bytes:
        body: bytes = self._client.get_object(Bucket=self._bucket, Key=f"objects/{int(sample):06}.bin")["Body"].read()
        return body


def of_boto3(given: dict[str, Any]) -> Callable[[int], Ids]:
    objects = Objects(given["num_samples"], given["bucket"], given["threads"])
    pool = ThreadPoolExecutor(given["threads"])

    def epoch_of(epoch: int) -> Iterator[list[int]]:
        order = np.random.default_rng([1, epoch]).permutation(len(objects))
        pending = [pool.submit(objects.__getitem__, sample) for sample in order]
        for start in range(0, len(order), given["batch"]):
            yield [id_of(each.result()) for each in pending[start : start + given["batch"]]]
            pending[start : start + given["batch"]] = [pending[-1]] * len(pending[start : start + given["batch"]])

    return epoch_of


def of_grain(given: dict[str, Any]) -> Callable[[int], Ids]:
    import grain.python as grain

    objects = Objects(given["num_samples"], given["bucket"], given["threads"])

    def epoch_of(epoch: int) -> Iterator[list[int]]:
        shuffled = grain.MapDataset.source(objects).shuffle(seed=1 + epoch)
        options = grain.ReadOptions(num_threads=given["threads"], prefetch_buffer_size=4 * given["batch"])
        batches = shuffled.to_iter_dataset(options).batch(given["batch"], batch_fn=list)
        return ([id_of(sample) for sample in batch] for batch in batches)

    return epoch_of


def of_nothing(given: dict[str, Any]) -> Callable[[int], Ids]:
    ids = np.arange(given["num_samples"])
    return lambda epoch: np.split(ids, range(given["batch"], len(ids), given["batch"]))


def of_refill(given: dict[str, Any]) -> Callable[[int], Ids]:
    from torch.utils.data import DataLoader

    import refill

    data = refill.CacheDataset(
        given["service"],
        dataset=f"s3://{given['bucket']}/blobs",
        job=given["job"],
        policy=given["policy"],
        chunk_size=given["chunk_size"],
        policy_settings=given["settings"],
        num_epochs=given["epochs"],
        transform=sample_id,
    )
    sampler = refill.EpochSampler(data)
    loader = DataLoader(
        data, given["batch"], sampler=sampler, num_workers=given["workers"], persistent_workers=True, collate_fn=list
    )

    def epoch_of(epoch: int) -> Ids:
        sampler.set_epoch(epoch)
        return loader

    return epoch_of


def sample_id(sample: dict[str, Any]) -> int:
    return id_of(sample["bin"])


def id_of(sample: Any) -> int:
    return int.from_bytes(bytes(sample[:8]), "big")


def main() -> None:
    given = json.loads(sys.argv[1])
    epoch_of = {"boto3": of_boto3, "grain": of_grain, "refill": of_refill, "none": of_nothing}[given["loader"]](given)
    counts = open_counts(given["counts"])
    times, read, ids = [], [counts.copy()], []
    for epoch in range(given["epochs"]):
        began = time.monotonic()
        of_epoch: list[int] = []
        for batch in epoch_of(epoch):
            of_epoch += [int(sample) for sample in batch]
            time.sleep(given["compute_seconds"])
        times.append((began, time.monotonic()))
        read.append(counts.copy())
        ids.append(np.array(of_epoch))
    np.savez(given["output"], times=np.array(times), read=np.array(read), ids=np.array(ids))


if __name__ == "__main__":
    main()
