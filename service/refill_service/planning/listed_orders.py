"""What order does a file name? One sample id a line, dealt to ranks as torch's DistributedSampler deals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from refill.errors import InvalidInput
from refill_service.cache_core.epoch_order import ExplicitTraces, Traces
from refill_service.cache_core.sample_mapping import Int64Array


def orders_of_file(path: Path, num_samples: int | None, num_epochs: int | None) -> tuple[int, list[Int64Array]]:
    """``(samples, the order of each epoch)`` of a file with one sample id a line.

    As many epochs as are given, of as many lines as there are samples; one epoch may have any length. Where nothing is
    given, there are epochs if each run of so many lines names every sample once, else all is one order.

    :param num_samples: None: as the largest id says.
    """
    asked = _ids_of(path)
    if not len(asked):
        raise InvalidInput(f"trace {path} names no sample")
    if num_samples is None:
        num_samples = int(asked.max()) + 1
    if len(wrong := np.flatnonzero(asked >= num_samples)):
        line = int(wrong[0])
        raise InvalidInput(f"trace {path} line {line + 1}: sample {asked[line]}; there are 0 to {num_samples - 1}")
    if num_epochs is None:
        num_epochs, more = divmod(len(asked), num_samples)
        if more or (np.sort(asked.reshape(num_epochs, -1)) != np.arange(num_samples)).any():
            num_epochs = 1
    if num_epochs < 1:
        raise InvalidInput(f"epochs must be at least 1, got {num_epochs}")
    if num_epochs > 1 and len(asked) != num_epochs * num_samples:
        raise InvalidInput(
            f"trace {path} names {len(asked):,} samples; {num_epochs} epochs of {num_samples:,} are "
            f"{num_epochs * num_samples:,}"
        )
    return num_samples, list(asked.reshape(num_epochs, -1))


def _ids_of(path: Path) -> Int64Array:
    try:
        lines = path.read_text().rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidInput(f"can't read trace {path}: {why}") from error
    if lines == [""]:
        return np.empty(0, dtype=np.int64)
    ids = np.empty(len(lines), dtype=np.int64)
    for number, line in enumerate(lines):
        text = line.strip()
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise InvalidInput(f"trace {path} line {number + 1}: {text[:40]!r} is no sample id")
        ids[number] = int(text)
    return ids


def dealt(orders: Sequence[Int64Array], num_samples: int, num_ranks: int) -> list[Traces]:
    """To ranks in turn; padded from the front."""
    found: list[Traces] = []
    for order in orders:
        padded = np.resize(order, -(-len(order) // num_ranks) * num_ranks)
        found.append(ExplicitTraces(num_samples, {rank: padded[rank::num_ranks] for rank in range(num_ranks)}))
    return found
