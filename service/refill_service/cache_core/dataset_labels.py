"""What is the label of a sample, and what do labels say of a dataset's order?

A label is what the member ``cls`` of a sample holds, a number from 0 on. Where all samples have one, labels are a
column of the dataset, and the index has in its metadata (``labels``) what is to be known without reading them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_LABELS = 1 << 20
"""Numbers beyond are no classes."""

_LONGEST_NUMBER = 20
_BY_CLASS = 0.5


def label_of(content: bytes) -> int:
    """The label that a member ``cls`` holds; -1 for none."""
    try:
        label = int(content) if len(content) <= _LONGEST_NUMBER else -1
    except ValueError:
        return -1
    return label if 0 <= label < MOST_LABELS else -1


@dataclass(frozen=True)
class LabelSummary:
    """What the index says of the labels."""

    classes: int
    """Different labels that there are."""
    least: int
    """Samples of the rarest of them."""
    most: int
    same_neighbours: float
    """Share of samples that have the label of the sample before."""
    same_by_chance: float
    """What that would be if the dataset were shuffled."""

    @property
    def by_class(self) -> bool:
        """Whether neighbours share labels far more often than by chance, as where a dataset is stored by class."""
        return self.same_neighbours - self.same_by_chance > _BY_CLASS * (1 - self.same_by_chance)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summary_in(metadata: dict[str, Any]) -> LabelSummary | None:
    """Of an index's metadata; None where there are no labels, or nothing that could be believed."""
    labels = metadata.get("labels")
    if not isinstance(labels, dict):
        return None
    values = [labels.get(field.name) for field in fields(LabelSummary)]
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return None
    classes, least, most, same, by_chance = values
    if not (0 <= same <= 1 and 0 <= by_chance <= 1):  # type: ignore[operator]
        return None
    return LabelSummary(int(classes), int(least), int(most), float(same), float(by_chance))  # type: ignore[arg-type]


class LabelCounts:
    """Counts labels in the order of the samples."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, dtype=np.int64)
        self._same = 0
        self._last = -1

    def add(self, labels: NDArray[np.int64]) -> None:
        if not len(labels):
            return
        counts = np.bincount(labels, minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts
        self._same += int(labels[0]) == self._last
        self._same += int(np.count_nonzero(labels[1:] == labels[:-1]))
        self._last = int(labels[-1])

    def summary(self) -> LabelSummary:
        counts = self._counts[self._counts > 0]
        total = int(counts.sum())
        pairs = max(1, total - 1)
        by_chance = float((counts * (counts - 1)).sum()) / max(1, total * (total - 1))
        return LabelSummary(
            len(counts),
            int(counts.min()),
            int(counts.max()),
            round(self._same / pairs, 4),
            round(by_chance, 4),
        )
