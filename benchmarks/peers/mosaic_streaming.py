"""MosaicML Streaming: what do MDS shards get, kept on disk up to ``cache_limit``?

``py1e``, its default, draws a sample from shards within ``shuffle_block_size`` samples of it. By default that is
262,144 samples, more than this dataset: each sample would need another shard, and a cache that holds a tenth of them
would fetch nearly a shard for each sample. So the block is half of the allowance here, and each worker downloads an
eighth of the allowance ahead: the shards in use fit the cache.
"""

from __future__ import annotations

from peers.batches import Epochs, collate
from peers.mosaicml import streaming
from peers.setting import BUCKET, Setting


def open_loader(setting: Setting) -> Epochs:
    dataset = streaming.StreamingDataset(
        remote=f"s3://{BUCKET}/mds",
        local=f"{setting.folder}/mds",
        shuffle=True,
        shuffle_algo="py1e",
        shuffle_block_size=setting.allowance_samples // 2,
        predownload=max(setting.batch_size, setting.allowance_samples // 8),
        cache_limit=setting.allowance_bytes,
        batch_size=setting.batch_size,
    )
    loader = streaming.StreamingDataLoader(
        dataset,
        batch_size=setting.batch_size,
        num_workers=setting.workers,
        persistent_workers=True,
        collate_fn=_collate_rows,
    )
    return lambda epoch: loader


def _collate_rows(rows):  # type: ignore[no-untyped-def]
    return collate([row["jpg"] for row in rows])
