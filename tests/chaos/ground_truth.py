"""Was every sample delivered exactly once? Counted from what ranks wrote down, with no word of the pods believed.

A job that was resumed has several *legs*: the ranks of before, up to the checkpoint, and those that went on from there.
What a leg received after the checkpoint was consumed by nobody, and comes again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.chaos.rank import read_answers, read_restarts

__all__ = ["Consumed", "GroundTruth", "Leg"]

_SHOWN = 5


@dataclass(frozen=True)
class Leg:
    """The ranks of a job from one resume to the next, and where they began."""

    files: Sequence[Path]
    """By rank."""
    epoch: int = 0
    position: int = 0
    """All ranks of the leg before had consumed so far when the checkpoint was saved."""
    before: Leg | None = None
    """The leg that saved the checkpoint."""
    dealt_anew: bool = False
    """Whether positions of ``epoch`` are those of what was left of it, from 0 on."""
    dealt_from: int = 0
    """Of a planned job: from which position of the epoch's one order on that epoch is dealt."""
    saved_at: int = 0
    """Of a planned job: the position, as the ranks of the leg before count them, at which the checkpoint was saved."""


class Consumed(NamedTuple):
    """What was consumed of an epoch."""

    unanswered: int
    twice: list[int]
    """Samples that came more than once; as often as they came too often."""
    never: list[int]
    changed: int
    """Positions that got another sample when they were asked for again, by a loop that had not gone back."""

    @property
    def in_doubt(self) -> int:
        """So many, at least, a receipt has to call unknown, but for positions that were asked for again."""
        return max(len(self.twice), len(self.never))


class GroundTruth:
    """What the ranks of one job received.

    :param checksums: crc32 of each sample of the dataset, by its id.
    """

    def __init__(self, leg: Leg, checksums: Sequence[int]) -> None:
        self.damaged: list[str] = []
        """Whatever is said of deliveries, these are wrong."""
        self.asked_again = 0
        """Positions that were asked for more than once, and got the same sample."""
        self.deliveries = 0
        self._changed: list[tuple[int, str, bool]] = []
        """Epoch, what changed in words, and whether the loop had gone back, so that the later sample counts alone."""
        self._checksums = checksums
        self._leg = leg
        self._samples: dict[int, dict[tuple[int, int, int], int]] = {}
        """Of each leg by its identity: by epoch, rank and position."""
        each: Leg | None = leg
        while each is not None:
            self._samples[id(each)] = {}
            for rank, path in enumerate(each.files):
                self._read(each, rank, path)
            self.deliveries += len(self._samples[id(each)])
            each = each.before

    def _read(self, leg: Leg, rank: int, path: Path) -> None:
        samples_of = self._samples[id(leg)]
        answers, restarts = list(read_answers(path)), read_restarts(path)
        gone_back: set[tuple[int, int, int]] = set()
        """What is asked for once more, since a loop that was started again went back to a place before it."""
        for number, (epoch, positions, samples, checksums, _) in enumerate(answers):
            if (kept := restarts.get(number)) is not None:
                had = {(answer.epoch, rank, position) for answer in answers[:kept] for position in answer.positions}
                gone_back |= {key for key in samples_of if key[1] == rank and key not in had}
            for position, sample, checksum in zip(positions, samples, checksums, strict=True):
                where = f"epoch {epoch}, rank {rank}, position {position}"
                if not 0 <= sample < len(self._checksums):
                    self.damaged.append(f"{where}: there is no sample {sample}")
                elif checksum != self._checksums[sample]:
                    self.damaged.append(f"{where}: the bytes of sample {sample} are wrong")
                key = epoch, rank, position
                before, has_gone_back = samples_of.get(key), key in gone_back
                gone_back.discard(key)
                if before == sample:
                    self.asked_again += 1
                elif before is None:
                    samples_of[key] = sample
                else:
                    said = f"{where}: sample {before}, and asked again sample {sample}"
                    self._changed.append((epoch, said, has_gone_back))
                    if has_gone_back:
                        samples_of[key] = sample

    def of_epoch(self, epoch: int) -> Consumed:
        """The ranks divide the dataset without a rest; what was left of an epoch may take repeats."""
        num_samples = len(self._checksums)
        prefix = list(self._prefix(self._leg, epoch))
        own = {key: sample for key, sample in self._samples[id(self._leg)].items() if key[0] == epoch}
        leg, ranks = self._leg, len(self._leg.files)
        first = leg.position if leg.epoch == epoch and not leg.dealt_anew else 0
        dealt = self._dealt(leg, epoch)
        length = -(-(num_samples - len(list(self._prefix(dealt, epoch)))) // ranks)
        if epoch < leg.epoch:
            length, own = 0, {}
        elif leg.epoch == epoch:
            own = {key: sample for key, sample in own.items() if key[2] >= first}
        unanswered = sum((epoch, rank, at) not in own for rank in range(ranks) for at in range(first, length))
        repeats = max(0, len(prefix) + ranks * (length - first) - num_samples)
        counts = Counter([*prefix, *own.values()])
        twice = [sample for sample, count in counts.items() for _ in range(count - 1)]
        never = sorted(set(range(num_samples)) - set(counts))
        of_rest = set(own.values()) - set(prefix)  # repeats are of the rest, and no others
        for sample in [sample for sample in twice if sample in of_rest][:repeats]:
            twice.remove(sample)
        return Consumed(
            unanswered, sorted(twice), never, sum(each == epoch and not back for each, _, back in self._changed)
        )

    def _dealt(self, leg: Leg, epoch: int) -> Leg:
        """The leg at whose beginning the epoch's positions were dealt that this one goes on with."""
        while leg.epoch == epoch and not leg.dealt_anew and leg.before is not None:
            leg = leg.before
        return leg

    def _prefix(self, leg: Leg, epoch: int) -> Iterator[int]:
        """The samples of an epoch that were consumed before a leg began."""
        before = leg.before
        if before is None or epoch > leg.epoch:
            return
        yield from self._prefix(before, epoch)
        end = leg.position if epoch == leg.epoch else len(self._checksums)
        start = before.position if before.epoch == epoch and not before.dealt_anew else 0
        for (of_epoch, _, position), sample in self._samples[id(before)].items():
            if of_epoch == epoch and start <= position < end:
                yield sample

    def problems_of(self, epoch: int, *, may_be_forgotten: bool = False) -> list[str]:
        """In words, empty when the epoch gave every sample exactly once.

        :param may_be_forgotten: whether pods may not know what a loop had had that went back: it may come otherwise.
        """
        found = self.of_epoch(epoch)
        problems = [f"epoch {epoch}: {found.unanswered} positions without an answer"] * bool(found.unanswered)
        for what, samples in (("came more than once", found.twice), ("never came", found.never)):
            if samples:
                shown = [*map(str, samples[:_SHOWN]), *["..."] * (len(samples) > _SHOWN)]
                problems.append(f"epoch {epoch}: {len(samples)} samples that {what}: {', '.join(shown)}")
        changed = [
            text for of_epoch, text, back in self._changed if of_epoch == epoch and not (back and may_be_forgotten)
        ]
        return problems + changed[:_SHOWN]

    def check(self, epochs: int) -> list[str]:
        return self.damaged + [problem for epoch in range(epochs) for problem in self.problems_of(epoch)]
