"""refill: samples for training from an object store, each exactly once an epoch."""

__version__ = "0.1.0"
