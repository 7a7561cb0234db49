"""What is memory for samples of a planned job divided into, on one pod, and when does that not fit?

    memory for samples = what the order is planned for + what is read ahead of that + what loaders ask for out of order

Beside it, of a job's memory: what the plan itself takes, and answers that are kept a little. Pods divide by it when a
job is planned; clients and ``refill analyze`` say by it what does not fit. Figures are in docs/PLANNED.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_PLANNED_PART = 0.8
"""At most. With a fifth left, loader workers may be out of order, and ranks out of step, as far as they usually are."""
_LISTED_PART = 0.5
"""At most, where ranks have the order in lists that were not planned within classes. With more, chunk-mates meet less,
and more is read."""
_LEAST_PLANNED_PART = 0.5
"""However much is asked for at once: with less, chunks that are planned for are few, and nothing more is saved."""
_READ_AHEAD_PART = 0.1
"""Two seconds of the link, which pods do not know: as much as may be under way at once."""


class PlanMemory(NamedTuple):
    """How a planned job's memory for samples is divided on one pod, in bytes."""

    samples_bytes: int
    """There are so many for samples."""
    planned_bytes: int
    """The order is planned for so many."""

    @property
    def read_ahead_bytes(self) -> int:
        return int(_READ_AHEAD_PART * self.samples_bytes)

    @property
    def loaders_bytes(self) -> int:
        """That loaders may ask for at once."""
        return max(0, self.samples_bytes - self.planned_bytes)

    def to_dict(self) -> dict[str, int]:
        return self._asdict() | {"read_ahead_bytes": self.read_ahead_bytes, "loaders_bytes": self.loaders_bytes}

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> PlanMemory:
        return cls(*(int(given[name]) for name in cls._fields))

    def lacks(self, at_once_bytes: int, dataset_bytes: int | None = None) -> str | None:
        """What does not fit, and what to do, in words; None: all does.

        :param at_once_bytes: that loaders ask for at once; 0: not known.
        :param dataset_bytes: of all samples; None: they are more than there is memory for.
        """
        if dataset_bytes is not None and dataset_bytes <= self.samples_bytes:
            return None
        if self.planned_bytes > self.samples_bytes:
            return (
                f"its order is planned for {self.planned_bytes:,} bytes on each pod, and there are "
                f"{self.samples_bytes:,} for samples: some are read more than once; give it the memory that it began "
                "with, or end it and start it anew"
            )
        if at_once_bytes <= self.loaders_bytes:
            return None
        needs_bytes = int(at_once_bytes / (1 - _LEAST_PLANNED_PART - _READ_AHEAD_PART))
        more = (
            f"memory for {needs_bytes:,} bytes of samples on each pod"
            if needs_bytes > self.samples_bytes
            else "plan_bytes for "
            f"{divided(self.samples_bytes, at_once_bytes, is_listed=False).planned_bytes:,} bytes on each pod"
        )
        return (
            f"loaders ask for {at_once_bytes:,} bytes at once on each pod (ranks x workers x batch), and beside the "
            f"{self.planned_bytes:,} that its order is planned for there are {self.loaders_bytes:,}: some samples are "
            f"read more than once; give it {more}, or fewer workers or smaller batches"
        )


def divided(samples_bytes: int, at_once_bytes: int, *, is_listed: bool) -> PlanMemory:
    """Of a job that is new.

    :param at_once_bytes: that loaders ask for at once on a pod; 0: not known.
    :param is_listed: whether ranks have the order in lists, which was not planned within classes.
    """
    most = int((_LISTED_PART if is_listed else _PLANNED_PART) * samples_bytes)
    beside = samples_bytes - int(_READ_AHEAD_PART * samples_bytes) - at_once_bytes
    return PlanMemory(samples_bytes, max(int(_LEAST_PLANNED_PART * samples_bytes), min(most, beside)))


def asked_at_once(positions: int, num_ranks: int, sample_bytes: float, num_pods: int) -> int:
    """Bytes on one pod.

    :param positions: that the loader of each rank asks for at once, workers x batch; 0: not known.
    """
    return int(positions * num_ranks * sample_bytes / num_pods)
