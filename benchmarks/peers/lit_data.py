"""LitData: what do its chunks get, kept on disk up to ``max_cache_size``?

Its faster S3 client (obstore) refuses an ``http://`` endpoint, and no option of LitData's reaches the one that allows
it; so that option is set where LitData keeps it. Nothing else is touched.
"""

from __future__ import annotations

from typing import Any

import litdata
from litdata.streaming import downloader
from litdata.streaming.cache import Dir
from peers.batches import Batch, Epochs, collate
from peers.setting import ACCESS_KEY, BUCKET, SECRET_KEY, Setting


def open_loader(setting: Setting) -> Epochs:
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"
    dataset = litdata.StreamingDataset(
        Dir(path=f"{setting.folder}/litdata", url=f"s3://{BUCKET}/litdata"),
        shuffle=True,
        max_cache_size=setting.allowance_bytes,
        storage_options={
            "endpoint_url": setting.store_url,
            "aws_access_key_id": ACCESS_KEY,
            "aws_secret_access_key": SECRET_KEY,
            "region_name": "us-east-1",
        },
    )
    loader = litdata.StreamingDataLoader(
        dataset,
        batch_size=setting.batch_size,
        num_workers=setting.workers,
        persistent_workers=True,
        collate_fn=_collate_rows,
    )
    return lambda epoch: loader


def _collate_rows(rows: list[dict[str, Any]]) -> Batch:
    return collate([row["jpg"] for row in rows])
