"""What is the same for all loaders of a run? Read by every process from one JSON file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

__all__ = ["ACCESS_KEY", "BUCKET", "SECRET_KEY", "Setting"]

BUCKET = "peers"
ACCESS_KEY = "test"
SECRET_KEY = "test-secret"


@dataclass(frozen=True)
class Setting:
    """One loader's run."""

    loader: str
    """A name of ``loaders.LOADERS``."""
    samples: int
    mean_bytes: int
    """Of a sample, over the whole dataset."""
    total_bytes: int
    allowance_bytes: int
    """Memory or disk that the loader may keep samples in, over all its processes; 0: it keeps none."""
    batch_size: int
    workers: int
    epochs: int
    compute_seconds: float
    """What the loop sleeps for each batch."""
    limit_seconds: float
    """An epoch that takes longer is broken off, and is the last."""
    store_url: str
    pod_urls: tuple[str, ...]
    pod_pids: tuple[int, ...]
    counts_file: str
    """Where the store counts: see ``store_counts.py``."""
    folder: str
    """An empty folder on a local disk, for loaders that cache on one."""

    @property
    def allowance_samples(self) -> int:
        return self.allowance_bytes // self.mean_bytes

    def environment(self) -> dict[str, str]:
        """Where S3 is, as the libraries find it."""
        return {
            "AWS_ENDPOINT_URL": self.store_url,
            "S3_ENDPOINT_URL": self.store_url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: str) -> Setting:
        setting = cls(**json.loads(Path(path).read_text()))
        os.environ.update(setting.environment())
        return replace(setting, pod_urls=tuple(setting.pod_urls), pod_pids=tuple(setting.pod_pids))
