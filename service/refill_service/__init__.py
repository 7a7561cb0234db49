"""The service: cache pods, the tools that make datasets, and the ``refill`` command."""
