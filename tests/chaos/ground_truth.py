"""Was every sample of a live job delivered exactly once? Counted from what ranks wrote down, with no word of the pods
believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.rank import read_answers

__all__ = ["GroundTruth"]

_SHOWN = 5


class GroundTruth:
    """What the ranks of one run of a job received. They divide the dataset without a rest.

    :param files: of what ranks wrote down, by rank.
    :param checksums: crc32 of each sample of the dataset, by its id.
    """

    def __init__(self, files: Sequence[Path], checksums: Sequence[int]) -> None:
        self.wrong: list[str] = []
        """Whatever is still to come: bytes, and samples that changed when they were asked for again."""
        self.asked_again = 0
        """Positions that were asked for more than once, and got the same sample."""
        self._checksums = checksums
        self._num_ranks = len(files)
        self._samples: dict[tuple[int, int, int], int] = {}
        """By epoch, rank and position."""
        for rank, path in enumerate(files):
            self._read(rank, path)

    @property
    def deliveries(self) -> int:
        return len(self._samples)

    def _read(self, rank: int, path: Path) -> None:
        for epoch, positions, samples, checksums, _ in read_answers(path):
            for position, sample, checksum in zip(positions, samples, checksums, strict=True):
                where = f"epoch {epoch}, rank {rank}, position {position}"
                if not 0 <= sample < len(self._checksums):
                    self.wrong.append(f"{where}: there is no sample {sample}")
                elif checksum != self._checksums[sample]:
                    self.wrong.append(f"{where}: the bytes of sample {sample} are wrong")
                if (before := self._samples.get((epoch, rank, position))) is None:
                    self._samples[epoch, rank, position] = sample
                elif before == sample:
                    self.asked_again += 1
                else:
                    self.wrong.append(f"{where}: sample {before}, and asked again sample {sample}")

    def twice_in(self, epoch: int) -> list[str]:
        """In words, empty when none has come more than once so far."""
        counts = Counter(sample for (of, _, _), sample in self._samples.items() if of == epoch)
        return _said(epoch, "came more than once", sorted(sample for sample, count in counts.items() if count > 1))

    def problems_of(self, epoch: int) -> list[str]:
        """In words, empty when the epoch gave every sample exactly once."""
        num_samples = len(self._checksums)
        came = {key: sample for key, sample in self._samples.items() if key[0] == epoch}
        unanswered = num_samples // self._num_ranks * self._num_ranks - len(came)
        problems = [f"epoch {epoch}: {unanswered} positions without an answer"] * bool(unanswered)
        never = sorted(set(range(num_samples)) - set(came.values()))
        return problems + self.twice_in(epoch) + _said(epoch, "never came", never)

    def check(self, epochs: int) -> list[str]:
        return self.wrong + [problem for epoch in range(epochs) for problem in self.problems_of(epoch)]


def _said(epoch: int, what: str, samples: list[int]) -> list[str]:
    if not samples:
        return []
    shown = [*map(str, samples[:_SHOWN]), *["..."] * (len(samples) > _SHOWN)]
    return [f"epoch {epoch}: {len(samples)} samples that {what}: {', '.join(shown)}"]
