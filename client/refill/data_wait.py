"""How long does the training loop wait for data? Measured around any loader, reported to the home pod."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from refill.errors import RefillError

if TYPE_CHECKING:
    from refill.torch_dataset import CacheDataset

__all__ = ["TimedLoader", "timed"]

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")
_REPORT_SECONDS = 1.0


def timed(loader: Iterable[Batch], dataset: CacheDataset) -> TimedLoader[Batch]:
    """``for batch in refill.timed(loader, dataset)``: the same batches, and the time blocked in the loader measured."""
    return TimedLoader(loader, dataset)


class TimedLoader(Generic[Batch]):
    """A loader that measures how long its caller waits for batches.

    ``wait_seconds``, ``batches``, ``samples`` and ``num_bytes`` are totals since it was made. About once a second, and
    at the end of an iteration, the home pod is told; its ``/metrics`` shows the sums by job and rank. A report that
    fails is logged, and its figures go with the next.
    """

    def __init__(self, loader: Iterable[Batch], dataset: CacheDataset) -> None:
        self._loader = loader
        self._dataset = dataset
        self.wait_seconds = 0.0
        self.batches = 0
        self.samples = 0
        self.num_bytes = 0
        self._reported = (0.0, 0, 0)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        started = last_report = time.perf_counter()
        try:
            for batch in self._loader:
                now = time.perf_counter()
                self.wait_seconds += now - started
                self.batches += 1
                samples, num_bytes = _size(batch)
                self.samples += samples
                self.num_bytes += num_bytes
                if now - last_report >= _REPORT_SECONDS:
                    self._report()
                    last_report = now
                yield batch
                started = time.perf_counter()
        finally:
            self._report()

    def _report(self) -> None:
        wait, samples, num_bytes = self._reported
        self._reported = (self.wait_seconds, self.samples, self.num_bytes)
        try:
            self._dataset.connection.report(
                self.wait_seconds - wait, self.samples - samples, self.num_bytes - num_bytes
            )
        except RefillError as error:
            self._reported = (wait, samples, num_bytes)
            log.warning("data wait was not reported: %s", error)


def _size(batch: object) -> tuple[int, int]:
    """``(samples, bytes)`` of a collated batch, as far as they show: bytes of tensors, arrays, bytes and texts."""
    if isinstance(batch, dict):
        sizes = [_size(value) for value in batch.values()]
        return max((samples for samples, _ in sizes), default=0), sum(num_bytes for _, num_bytes in sizes)
    if isinstance(batch, (list, tuple)):
        return len(batch), sum(_size(value)[1] for value in batch)
    if isinstance(batch, (bytes, bytearray, str)):
        return 1, len(batch)
    num_bytes = int(getattr(batch, "nbytes", 0))
    shape: tuple[int, ...] = getattr(batch, "shape", ())
    return (int(shape[0]) if len(shape) else 1), num_bytes
