"""What does a pod's process hold at one moment? Read from outside: /proc and the pod's own metrics."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["PodSample", "read_csv", "sample_of", "write_csv"]

KINDS = ("abstract", "remote", "recent", "in_flight", "pinned")


@dataclass(frozen=True)
class PodSample:
    seconds: float
    """Since the soak began."""
    pod: int
    life: int
    """How often the pod had been restarted."""
    rss_bytes: int
    file_descriptors: int
    threads: int
    jobs: int
    abstract_bytes: int
    remote_bytes: int
    recent_bytes: int
    in_flight_bytes: int
    pinned_bytes: int

    @property
    def samples_bytes(self) -> int:
        """All that it counts as memory for samples."""
        return sum(int(getattr(self, f"{kind}_bytes")) for kind in KINDS)


def sample_of(seconds: float, pod: int, life: int, process: int, url: str) -> PodSample | None:
    """None when the pod is not there, or only just coming."""
    with contextlib.suppress(httpx.TransportError, FileNotFoundError, ProcessLookupError):
        metrics = httpx.get(f"{url}/metrics", timeout=5).text
        found = {
            (sample.name, sample.labels.get("kind", "")): sample.value
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
        }
        status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
        return PodSample(
            round(seconds, 1),
            pod,
            life,
            rss_bytes=int(status["VmRSS"].split()[0]) << 10,
            file_descriptors=len(list(Path(f"/proc/{process}/fd").iterdir())),
            threads=int(status["Threads"]),
            jobs=int(found["refill_jobs", ""]),
            **{f"{kind}_bytes": int(found["refill_resident_bytes", kind]) for kind in KINDS},
        )
    return None


def write_csv(path: Path, samples: Iterable[PodSample]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(PodSample)])
        writer.writeheader()
        writer.writerows(asdict(sample) for sample in samples)


def read_csv(path: Path) -> list[PodSample]:
    with path.open(newline="") as file:
        rows: list[dict[str, Any]] = [
            {name: float(value) if name == "seconds" else int(value) for name, value in row.items()}
            for row in csv.DictReader(file)
        ]
        return [PodSample(**row) for row in rows]
