"""Was every sample delivered exactly once? Counted from what ranks wrote down, with no word of the pods believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.rank import read_answers

__all__ = ["GroundTruth"]

_SHOWN = 5


class GroundTruth:
    """What the ranks of one job received.

    :param checksums: crc32 of each sample of the dataset, by its id.
    """

    def __init__(self, files: Sequence[Path], checksums: Sequence[int]) -> None:
        self.problems: list[str] = []
        """One line for each kind of thing that went wrong, in each epoch."""
        self.asked_again = 0
        """Positions that were asked for more than once, and got the same sample."""
        self._checksums = checksums
        self._samples: dict[tuple[int, int, int], int] = {}
        """By epoch, rank and position."""
        for rank, path in enumerate(files):
            self._read(rank, path)

    @property
    def deliveries(self) -> int:
        return len(self._samples)

    def _read(self, rank: int, path: Path) -> None:
        for epoch, positions, samples, checksums in read_answers(path):
            for position, sample, checksum in zip(positions, samples, checksums, strict=True):
                where = f"epoch {epoch}, rank {rank}, position {position}"
                if not 0 <= sample < len(self._checksums):
                    self.problems.append(f"{where}: there is no sample {sample}")
                elif checksum != self._checksums[sample]:
                    self.problems.append(f"{where}: the bytes of sample {sample} are wrong")
                before = self._samples.get((epoch, rank, position))
                if before is None:
                    self._samples[epoch, rank, position] = sample
                elif before == sample:
                    self.asked_again += 1
                else:
                    self.problems.append(f"{where}: sample {before}, and asked again sample {sample}")

    def check(self, epochs: int, ranks: int) -> list[str]:
        """All problems, after each epoch was looked at; empty when each gave every sample exactly once.

        The ranks divide the dataset without a rest.
        """
        length = len(self._checksums) // ranks
        for epoch in range(epochs):
            of_epoch = {(rank, at): s for (number, rank, at), s in self._samples.items() if number == epoch}
            unanswered = [(r, at) for r in range(ranks) for at in range(length) if (r, at) not in of_epoch]
            counts = Counter(of_epoch.values())
            twice = sorted(sample for sample, count in counts.items() if count > 1)
            never = sorted(set(range(len(self._checksums))) - set(counts))
            for what, found in (
                ("(rank, position) without an answer", unanswered),
                ("samples that came more than once", twice),
                ("samples that never came", never),
            ):
                if found:
                    shown = [*map(str, found[:_SHOWN]), *["..."] * (len(found) > _SHOWN)]
                    self.problems.append(f"epoch {epoch}: {len(found)} {what}: {', '.join(shown)}")
        return self.problems
