"""How many samples does an epoch of a mixture have of each dataset? As MosaicML's streaming counts them.

Datasets have weights, or each has ``repeat``, how often its samples come, or ``choose``, how many of them do. Weights
may change from some epochs on. Numbers are taken as they are written: 0.1 is a tenth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from refill.errors import InvalidInput
from refill.protocol.keyed_hash import key_of, numbers

_MOST = 1 << 40
_LEAST_PART, _MOST_PART = Fraction(1, 8), Fraction(1, 2)
"""Of the memory of a mixture: so much, from and to, is divided among its datasets whatever comes of each."""
_LEAST_CHUNKS = 4
"""A dataset of which little comes, or nothing until its weight changes, has memory for so many, as far as it goes."""
_SMALL_CHUNK = 8
"""As pods take them where the job names none, and memory is small."""


@dataclass(frozen=True)
class MixtureWeights:
    """How much of each dataset an epoch of a mixture has.

    :param names: of the datasets, in their order.
    :param weights: of datasets by their names, by the first epoch that they are of; who is not named has 0. Empty:
        there are none.
    :param repeat, choose: of datasets by their names; the others come once.
    :param epoch_size: samples of an epoch, with weights; 0: as many as all datasets have. Without weights, repeat and
        choose it takes datasets in the proportion of their sizes.

    Raises :class:`InvalidInput` for numbers that make no mixture.
    """

    names: tuple[str, ...]
    weights: Mapping[int, Mapping[str, Fraction]]
    repeat: Mapping[str, Fraction]
    choose: Mapping[str, int]
    epoch_size: int = 0

    @classmethod
    def of(cls, names: Sequence[str], weights: Any, repeat: Any, choose: Any, epoch_size: int | None) -> MixtureWeights:
        """As a training script gives them: ``weights`` by name, or by epoch and then by name."""
        if weights is not None and not isinstance(weights, Mapping):
            raise InvalidInput(f"weights must be numbers by the names of datasets, got {weights!r:.100}")
        given = {} if weights is None else dict(weights)
        if given and not all(isinstance(each, Mapping) for each in given.values()):
            given = {0: given}
        found = cls(
            tuple(names),
            {_whole("an epoch of weights", epoch): _numbers("weights", names, each) for epoch, each in given.items()},
            _numbers("repeat", names, repeat or {}),
            {name: _whole(f"choose of {name}", number) for name, number in _named("choose", names, choose or {})},
            0 if epoch_size is None else _whole("epoch_size", epoch_size, least=1),
        )
        if weights is not None and not given:
            raise InvalidInput("weights name no dataset")
        if found.weights and (found.repeat or found.choose):
            raise InvalidInput("a mixture has weights, or repeat and choose, not both")
        if both := sorted(set(found.repeat) & set(found.choose)):
            raise InvalidInput(f"dataset {both[0]} has repeat and choose: give one of them")
        if found.epoch_size and (found.repeat or found.choose):
            raise InvalidInput("epoch_size goes with weights; with repeat and choose it follows from them")
        if found.weights and 0 not in found.weights:
            raise InvalidInput(f"weights begin at epoch {min(found.weights)}: say which epoch 0 has")
        for epoch, each in found.weights.items():
            if not any(each.values()):
                raise InvalidInput(f"all weights from epoch {epoch} on are 0")
        return found

    def counts(self, epoch: int, sizes: Sequence[int], seed: int) -> list[int]:
        """Samples that an epoch has of each dataset. Raises :class:`InvalidInput` where a dataset has none to give.

        :param sizes: samples of each dataset.
        """
        if self.weights:
            now = self.weights[max(first for first in self.weights if first <= max(0, epoch))]
            parts = [now.get(name, Fraction()) for name in self.names]
            counts = counts_by_weights(parts, self.epoch_size or sum(sizes), seed)
        elif self.epoch_size:
            counts = counts_by_weights([Fraction(size) for size in sizes], self.epoch_size, seed)
        else:
            counts = [
                self.choose.get(name, int(size * self.repeat.get(name, 1)))
                for name, size in zip(self.names, sizes, strict=True)
            ]
        for name, size, count in zip(self.names, sizes, counts, strict=True):
            if count and not size:
                raise InvalidInput(f"dataset {name} of the mixture has no samples")
        return counts

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for states."""
        return {
            "names": list(self.names),
            "weights": {
                str(epoch): {name: str(part) for name, part in each.items()} for epoch, each in self.weights.items()
            },
            "repeat": {name: str(part) for name, part in self.repeat.items()},
            "choose": dict(self.choose),
            "epoch_size": self.epoch_size,
        }

    @classmethod
    def from_dict(cls, said: Any) -> MixtureWeights:
        """Raises :class:`InvalidInput` for what :meth:`to_dict` did not write."""
        try:
            names = tuple(str(name) for name in said["names"])
            weights = {int(epoch): _numbers("weights", names, each) for epoch, each in said["weights"].items()}
            repeat = _numbers("repeat", names, said["repeat"])
            choose = {str(name): int(number) for name, number in said["choose"].items()}
            return cls(names, weights, repeat, choose, int(said["epoch_size"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"the state is damaged: these are no weights of a mixture: {said!r:.100}") from error


def counts_by_weights(weights: Sequence[Fraction], epoch_size: int, seed: int) -> list[int]:
    """Each dataset has its part of the epoch, rounded down; what is then lacking comes, one each, of datasets that are
    drawn by the seed.

    :param weights: at least 0, and not all 0.
    """
    total = sum(weights)
    counts = [int(epoch_size * weight / total) for weight in weights]
    weighed = [place for place, weight in enumerate(weights) if weight]
    drawn = numbers(key_of("refill mixture shortfall", seed), len(weights)).tolist()
    for place in sorted(weighed, key=lambda place: (drawn[place], place))[: epoch_size - sum(counts)]:
        counts[place] += 1
    return counts


def memory_parts(
    memory_bytes: int,
    counts: Sequence[int],
    sample_bytes: Sequence[float],
    chunk_size: int = 0,
    most_bytes: Sequence[int] = (),
) -> list[int]:
    """Memory of each dataset's job, of what the mixture has: a few chunks for each, and the rest by the bytes that come
    of each in an epoch, so that samples of all stay as long. What small datasets can't use the others have.

    :param sample_bytes: of a sample of each, on average.
    :param chunk_size: of the jobs; 0: not known.
    :param most_bytes: that the job of each can use; empty: not known.
    """
    sizes = [max(1, int(size)) for size in sample_bytes]
    from_, to = (int(memory_bytes * part / len(sizes)) for part in (_LEAST_PART, _MOST_PART))
    chunks = [_LEAST_CHUNKS * (chunk_size or _SMALL_CHUNK) * size for size in sizes]
    least = [min(max(from_, each), to) for each in chunks]
    rates = [count * size for count, size in zip(counts, sizes, strict=True)]
    rest, total = memory_bytes - sum(least), sum(rates) or 1
    parts = [max(1, part + rest * rate // total) for part, rate in zip(least, rates, strict=True)]
    while most_bytes:
        left = sum(max(0, part - most) for part, most in zip(parts, most_bytes, strict=True))
        parts = [min(part, most) for part, most in zip(parts, most_bytes, strict=True)]
        takers = [rate * (part < most) for rate, part, most in zip(rates, parts, most_bytes, strict=True)]
        if not left or not (total := sum(takers)):
            break
        parts = [part + left * rate // total for part, rate in zip(parts, takers, strict=True)]
    return parts


def _named(what: str, names: Sequence[str], given: Any) -> list[tuple[str, Any]]:
    if not isinstance(given, Mapping):
        raise InvalidInput(f"{what} must be numbers by the names of datasets, got {given!r:.100}")
    if unknown := [name for name in given if name not in names]:
        raise InvalidInput(f"{what} name {unknown[0]!r}, and the mixture has {', '.join(names)}")
    return list(given.items())


def _numbers(what: str, names: Sequence[str], given: Any) -> dict[str, Fraction]:
    found = {}
    for name, number in _named(what, names, given):
        try:
            part = Fraction(str(number))
        except (ValueError, ZeroDivisionError):
            part = Fraction(-1)
        if not 0 <= part <= _MOST or part.denominator > 1 << 200:
            raise InvalidInput(f"{what} of {name} must be a number of at least 0, got {number!r:.50}")
        found[name] = part
    return found


def _whole(what: str, number: Any, least: int = 0) -> int:
    is_whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
    if not is_whole or not least <= number <= _MOST:
        raise InvalidInput(f"{what} must be a whole number of at least {least}, got {number!r:.50}")
    return int(number)
