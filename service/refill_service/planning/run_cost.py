"""What does a training run cost? GETs, a month of the bucket, and machines, in dollars."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from refill_service.planning.provider_prices import ProviderPrices

__all__ = ["RunCost", "run_cost"]


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
