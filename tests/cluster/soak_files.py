"""What is kept of a soak? Five tables of values separated by commas, in one folder, that are whole at any time.

- ``soak.csv``: for how long it was to run, and why it ended;
- ``events.csv``: each event, when it began and when it was over;
- ``epochs.csv``: each epoch, what was wrong by what the ranks got, and what the pods' receipt said;
- ``throughput.csv``: samples a second of both ranks, for every five seconds;
- ``memory.csv``: what the cgroup of each pod and each rank counted, every fifteen seconds.

Times are in seconds since the soak began.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from tests.cluster.ranks import Batch

__all__ = ["TIME_UP", "Done", "Epoch", "InMemory", "Rate", "Span", "Tables", "rates_of"]

RATE_SECONDS = 5
TIME_UP = "its time was up"
Kept = TypeVar("Kept", bound=tuple[Any, ...])


class Span(NamedTuple):
    minutes: float
    """That it was to run."""
    ended: str
    """Why; empty: it runs, or was killed."""


class Done(NamedTuple):
    """An event."""

    began: float
    ended: float
    """With the epoch in which it was over."""
    event: str
    exact: str
    longest_seconds: float
    """That a rank waited between two batches."""
    warnings: str


class Epoch(NamedTuple):
    epoch: int
    wrong: str
    receipt: str
    """Empty: it has not come yet."""


class Rate(NamedTuple):
    began: float
    samples_a_second: float


class InMemory(NamedTuple):
    at: float
    pod: str
    life: str
    """Another one when the pod was replaced."""
    now_bytes: int
    peak_bytes: int
    limit_bytes: int
    anonymous_bytes: int


class Tables(NamedTuple):
    span: list[Span]
    """One."""
    done: list[Done]
    epochs: list[Epoch]
    rates: list[Rate]
    memory: list[InMemory]

    def write(self, folder: Path) -> None:
        for name, kind, rows in zip(_NAMES, _KINDS, self, strict=True):
            new = folder / f"{name}.new"
            with new.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(kind._fields)
                writer.writerows(rows)
            new.rename(folder / f"{name}.csv")

    @classmethod
    def read(cls, folder: Path) -> Tables:
        return cls(*(_read(folder / f"{name}.csv", kind) for name, kind in zip(_NAMES, _KINDS, strict=True)))


_NAMES = ("soak", "events", "epochs", "throughput", "memory")
_KINDS: tuple[Any, ...] = (Span, Done, Epoch, Rate, InMemory)


def _read(path: Path, kind: type[Kept]) -> list[Kept]:
    types = get_type_hints(kind).values()
    with path.open(newline="") as file:
        _, *rows = csv.reader(file)
    return [kind(*(make(word) for make, word in zip(types, row, strict=True))) for row in rows]


def rates_of(batches: Iterable[Batch], began: float, ended: float) -> list[Rate]:
    """Of all the time in between that is whole."""
    counts = [0] * max(0, int((ended - began) / RATE_SECONDS))
    for batch in batches:
        step = int((batch.at - began) // RATE_SECONDS)
        if 0 <= step < len(counts):
            counts[step] += batch.samples
    return [Rate(float(RATE_SECONDS * step), count / RATE_SECONDS) for step, count in enumerate(counts)]
