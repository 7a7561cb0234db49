"""What does a training run cost? GETs, a month of the bucket, and machines, in dollars."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class RunCost:
    """What a training run costs, in dollars."""

    requests: float
    storage: float
    """Of a month, however long the run."""
    machines: float

    @property
    def total(self) -> float:
        return self.requests + self.storage + self.machines

    def to_dict(self) -> dict[str, float]:
        return asdict(self) | {"total": self.total}


def run_cost(
    prices: ProviderPrices,
    *,
    epochs: int,
    gets: float,
    run_seconds: float,
    machines: int,
    vm_hour: float,
    data_gb: float = 0.0,
) -> RunCost:
    """
    :param gets: of an epoch, of all machines.
    :param run_seconds: of all epochs together.
    :param vm_hour: dollars for a machine.
    """
    return RunCost(epochs * gets * prices.class_b, data_gb * prices.bucket_gb, machines * vm_hour * run_seconds / 3600)


@dataclass(frozen=True)
class ProviderPrices:
    """What a provider charges, in dollars, for the standard class in one region; traffic within the region is free."""

    class_a: float
    """A request that lists."""
    class_b: float
    """A GET."""
    bucket_gb: float
    """A month."""
    egress_gb: float = 0.0
    """Of what is read from outside of the provider: the price of the first terabytes."""


PRICES_AS_OF = "2025-01"
"""Providers change their prices: look at their lists before money depends on it."""

PROVIDERS = {
    "s3": ProviderPrices(5e-6, 4e-7, 0.023, 0.09),
    "gcs": ProviderPrices(5e-6, 4e-7, 0.020, 0.12),
    "r2": ProviderPrices(4.5e-6, 3.6e-7, 0.015, 0.0),
}
