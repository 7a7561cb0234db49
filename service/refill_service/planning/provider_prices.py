"""What do the stores charge? Change this file when they do, with its date."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PRICES_AS_OF", "PROVIDERS", "ProviderPrices"]


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
