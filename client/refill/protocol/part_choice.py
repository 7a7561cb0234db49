"""Which samples does a part of a dataset have? Chosen by their ids and keys, by what is known of each, and by a hash.

The hash, of the id or of the key, is the same for ever, so a part of 1 % lies in one of 10 %, and a sample is in the
same split as before when others are added: by id where they come behind it, by key wherever they come.
"""

from __future__ import annotations

import fnmatch
import hashlib
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from refill.errors import InvalidInput
from refill.protocol.column_values import KEYS, ColumnValues
from refill.protocol.keyed_hash import UInt64Array, key_of, numbers_at
from refill.protocol.wire_format import Int64Array

_ALL = 1 << 64


class Narrowed:
    """Samples of a dataset, of which each argument leaves a part. ``ids`` are those that are left, ascending."""

    def __init__(self, num_samples: int) -> None:
        self.ids: Int64Array = np.arange(num_samples, dtype=np.int64)
        self._by: list[str] = []

    def keep(self, argument: str, is_wanted: NDArray[np.bool_]) -> None:
        """:param argument: as a caller wrote it.
        :param is_wanted: ``(len(ids),)``.

        Raises :class:`InvalidInput` where nothing is left.
        """
        before, self.ids = len(self.ids), self.ids[is_wanted]
        if not len(self.ids):
            which = f"that {' and '.join(self._by)} leave" if self._by else "of the dataset"
            raise InvalidInput(" ".join(f"{argument} leaves none of the {before} samples {which}".split()))
        self._by.append(argument)


def of_mask(mask: ArrayLike, num_samples: int) -> NDArray[np.bool_]:
    """The mask ``(num_samples,)`` of samples by id."""
    found = np.asarray(mask)
    if found.dtype != bool or found.shape != (num_samples,):
        raise InvalidInput(
            f"where takes a mask, true or false for each of {num_samples} samples by id, and got {found.dtype} of "
            f"shape {found.shape}"
        )
    return found


def checked_ids(what: str, given: ArrayLike, num_samples: int) -> Int64Array:
    """Ids ``(n,)`` without repeats, ascending. Raises :class:`InvalidInput` for those that no sample has."""
    found = np.asarray(given)
    if found.size == 0:
        return np.empty(0, dtype=np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise InvalidInput(f"{what} must be whole numbers, ids of samples, got {found.dtype} of shape {found.shape}")
    found = np.unique(found.astype(np.int64))
    if not 0 <= found[0] <= found[-1] < num_samples:
        wrong = found[0] if found[0] < 0 else found[-1]
        raise InvalidInput(f"{what} name sample {wrong}, and the dataset has samples 0 to {num_samples - 1}")
    return found


def of_keys(
    blocks: Iterable[ColumnValues], patterns: Sequence[str] | str | None
) -> tuple[NDArray[np.bool_], UInt64Array]:
    """``(n,)`` whether the key of each sample is like one of the patterns, and a number of the key, for hashes.

    :param blocks: of all keys, by id.
    :param patterns: as ``dog/*``: ``*`` for any letters, ``?`` for one, ``[ab]`` for one of these; None: all.
    """
    given = [patterns] if isinstance(patterns, str) else patterns
    if given is not None and not (isinstance(given, Sequence) and all(isinstance(each, str) for each in given)):
        raise InvalidInput(f"keys must be patterns, as 'dog/*', got {patterns!r:.100}")
    is_like = None if given is None else re.compile("|".join(map(fnmatch.translate, given)) or "(?!)").match
    matches, numbers = list[bool](), bytearray()
    for block in blocks:
        if not isinstance(block, list):
            raise InvalidInput(
                f"column {KEYS} holds numbers, and keys are text: write it by refill index --column {KEYS}"
            )
        matches += [True] * len(block) if is_like is None else [is_like(key) is not None for key in block]
        for key in block:
            numbers += hashlib.blake2b(key.encode(), digest_size=8).digest()
    return np.array(matches, dtype=bool), np.frombuffer(bytes(numbers), "<u8").astype(np.uint64)


def of_lengths(lengths: Int64Array, bounds: tuple[int, int]) -> NDArray[np.bool_]:
    """``(n,)``: whether each of these bytes ``(n,)`` is one of ``(least, most)``, or between them."""
    is_pair = (
        isinstance(bounds, (Sequence, np.ndarray))
        and len(bounds) == 2
        and all(isinstance(each, Real) for each in bounds)
    )
    if not is_pair or not bounds[0] <= bounds[1]:
        raise InvalidInput(f"lengths must be (least, most) bytes of a sample, got {bounds!r:.100}")
    return (lengths >= bounds[0]) & (lengths <= bounds[1])


def in_fraction(ids: Int64Array | UInt64Array, fraction: float, argument: str = "fraction") -> NDArray[np.bool_]:
    """``(n,)``: whether each is in this part of all, at random; those of a smaller part are in each larger one.

    :param ids: of samples, or numbers of their keys.
    :param argument: as a caller calls the fraction, in errors.
    """
    return _hashes("refill part fraction", ids) < _place(_fraction(argument, fraction))


def in_split(ids: Int64Array | UInt64Array, split: str | None, splits: Mapping[str, float] | None) -> NDArray[np.bool_]:
    """``(n,)``: whether each is in the split of this name. Each sample is in one of them, or in none where their parts
    are less than all.

    :param ids: of samples, or numbers of their keys.
    :param splits: the part of each, by name, in their order.
    """
    if not isinstance(splits, Mapping) or not splits:
        raise InvalidInput(f"splits must be parts by name, as {{'train': 0.9, 'test': 0.1}}, got {splits!r:.100}")
    if split is None or split not in splits:
        raise InvalidInput(f"split must be one of {', '.join(map(repr, splits)):.200}, got {split!r:.100}")
    ends = [Fraction()]
    for name, part in splits.items():
        ends.append(ends[-1] + _fraction(f"split {name}", part))
    if ends[-1] > 1:
        raise InvalidInput(f"splits are {float(ends[-1]):g} of all samples together, more than there are")
    number = list(splits).index(split)
    hashes = _hashes("refill part split", ids)
    found: NDArray[np.bool_] = (hashes >= _place(ends[number])) & (hashes < _place(ends[number + 1]))
    return found if ends[number + 1] < 1 else hashes >= _place(ends[number])


def _hashes(purpose: str, ids: Int64Array | UInt64Array) -> UInt64Array:
    return numbers_at(key_of(purpose), ids.astype(np.uint64))


def _place(part: Fraction) -> np.uint64:
    return np.uint64(min(_ALL - 1, int(part * _ALL)))


def _fraction(what: str, given: Any) -> Fraction:
    try:
        found = Fraction(str(given))
    except (ValueError, ZeroDivisionError):
        found = Fraction(-1)
    if not 0 <= found <= 1:
        raise InvalidInput(f"{what} must be a number from 0 to 1, got {given!r:.50}")
    return found


def labels_named(wanted: Any, classes: Sequence[str] | None, labels: Int64Array) -> list[int]:
    """Numbers of classes, given by number or by name: one or several.

    :param labels: ``(num_samples,)``. Raises :class:`InvalidInput` for a number that neither they nor names have.
    """
    given = [wanted] if isinstance(wanted, str) or not isinstance(wanted, Iterable) else list(wanted)
    found = []
    for each in given:
        if isinstance(each, str):
            if classes is None or each not in classes:
                named = ", ".join(map(repr, classes or ())) or "no names of classes"
                raise InvalidInput(f"there is no class {each!r:.100}; the dataset has {named:.500}")
            found.append(list(classes).index(each))
            continue
        try:
            found.append(operator.index(each))
        except TypeError:
            raise InvalidInput(f"classes must be numbers or names of classes, got {each!r:.100}") from None
    nowhere = np.setdiff1d(found, np.append(labels, np.arange(len(classes or ()))))
    if len(nowhere):
        raise InvalidInput(
            f"there is no class {nowhere[0]}; the dataset has classes {labels.min()} to {labels.max()}, "
            f"{len(np.unique(labels))} of them"
        )
    return found
