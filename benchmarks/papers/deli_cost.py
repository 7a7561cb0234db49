"""What does a training run cost whose machines are rented, and whose dataset lies in a bucket or on their disks?

The cost model of DELI (III-C). Requests are billed in two classes: A lists the bucket, page by page, B reads a sample
or a chunk. A service that fetches ahead, as DELI's, lists the whole bucket for each fetch. Storage is billed by the
month: a month is what is counted here, however long the run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from refill_service.planning.run_cost import ProviderPrices

__all__ = ["Run", "RunCost", "run_cost"]


@dataclass(frozen=True)
class Run:
    prices: ProviderPrices
    run_seconds: float
    """Of all epochs together."""
    vm_hour: float
    """Dollars for a machine."""
    nodes: int = 1
    epochs: int = 1
    gets: int = 0
    """Of an epoch, of all nodes."""
    listed: int = 0
    """Objects that a listing of the bucket names."""
    fetch_size: int = 0
    """0: no service lists the bucket for each fetch; it is listed once an epoch."""
    page: int = 1000
    """Objects that one request lists."""
    disk_gb: float = 0.0
    """Dollars for a gigabyte of a machine's disk, a month."""
    system_gb: float = 0.0
    """On each machine's disk beside data."""
    cache_gb: float = 0.0
    """On each machine's disk."""
    data_gb: float = 0.0
    bucket: bool = True
    """False: each machine has the whole dataset on its disk."""
    read_gb: float = 0.0
    """Of an epoch, what machines read that are not at the provider: its traffic is billed."""


@dataclass(frozen=True)
class RunCost:
    """In dollars."""

    api: float
    storage: float
    vms: float
    traffic: float = 0.0
    """What leaves the provider."""

    @property
    def total(self) -> float:
        return self.api + self.storage + self.vms + self.traffic

    def to_dict(self) -> dict[str, float]:
        return asdict(self) | {"total": self.total}


def run_cost(run: Run) -> RunCost:
    vms = run.nodes * run.vm_hour * run.run_seconds / 3600
    if not run.bucket:
        return RunCost(0.0, run.nodes * run.disk_gb * (run.system_gb + run.data_gb), vms)
    listings = _ceil(run.listed, run.page) * (_ceil(run.gets, run.fetch_size) if run.fetch_size else 1)
    api = run.epochs * (listings * run.prices.class_a + run.gets * run.prices.class_b)
    on_disks = run.nodes * run.disk_gb * (run.system_gb + run.cache_gb)
    traffic = run.epochs * run.read_gb * run.prices.egress_gb
    return RunCost(api, on_disks + run.prices.bucket_gb * run.data_gb, vms, traffic)


def _ceil(number: int, part: int) -> int:
    return -(-number // part)
