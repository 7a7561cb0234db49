"""In which order does each rank ask for samples in an epoch?

``KeyedPermutation`` shuffles 0..n-1 with random access in both directions and no list of samples: a Feistel
network over the smallest power of two that holds n, walked until it lands inside (Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", 2002, section 4 and 5). Up to 65,536 samples it keeps the shuffled list, which is
then exactly uniform. ``KeyedTraces`` deals the permutation to ranks as torch's DistributedSampler does;
``ExplicitTraces`` holds what clients with their own sampler posted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from refill.errors import InvalidInput
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.sample_mapping import Int64Array

IdArray = NDArray[np.signedinteger[Any]]
"""Sample ids, in 4 bytes each where a dataset has few enough."""

_ROUNDS = 8
_LISTED = 1 << 16


class Traces(Protocol):
    """The traces of all ranks in one epoch."""

    @property
    def num_ranks(self) -> int: ...

    def length(self, rank: int) -> int:
        """Positions of a rank: ``0 <= position < length``."""
        ...

    @property
    def longest(self) -> int:
        """The largest :meth:`length`."""
        ...

    def asked(self, rank: int, positions: Int64Array) -> tuple[Int64Array, NDArray[np.bool_]]:
        """``(samples, repeats)`` of a rank's positions.

        A *repeat* asks for a sample that another position of the epoch asks for too (padding, or sampling with
        replacement). It gets exactly that sample and takes no part in redirection, which hands out each once.
        """
        ...

    def in_step(self, start: int, end: int) -> tuple[Int64Array, Int64Array, NDArray[np.bool_]]:
        """``(times, samples, repeats)`` of the positions ``start <= position < end`` of all ranks, as ranks in step ask
        for them. Times are ``position * ranks + rank``."""
        ...

    def members(self, first: int, end: int) -> NDArray[np.bool_] | None:
        """Which samples ``first <= sample < end`` are asked for at all; None: every one of them."""
        ...

    def position_of(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """``(ranks, positions)`` that ask for each of these members first. A position at or past the rank's length
        was dropped."""
        ...

    def repeats_of(self, first: int, end: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """``(samples, ranks, positions)`` of all repeats of the samples ``first <= sample < end``, in any order."""
        ...


class KeyedPermutation:
    """A permutation of ``0 .. n-1`` that follows from its key.

    ``forward`` maps a place in the shuffled order to a sample, ``inverse`` a sample to its place. Both take and
    return int64 arrays of any shape ``(m,)``. Memory is constant (at most 1 MiB), whatever n is.

    :param key: any text; the same key gives the same permutation on every machine and numpy version.
    """

    def __init__(self, n: int, key: str) -> None:
        if not 1 <= n <= 1 << 62:
            raise InvalidInput(f"a permutation needs 1 to 2**62 items, got {n}")
        self.n = n
        words = np.frombuffer(
            b"".join(hashlib.blake2b(f"{key}/{i}".encode()).digest() for i in range(_ROUNDS // 4)), dtype="<u8"
        )
        self._add = words[:_ROUNDS]
        self._multiply = words[_ROUNDS : 2 * _ROUNDS] | np.uint64(1)
        self._places: tuple[Int64Array, Int64Array] | None = None
        if n <= _LISTED:
            hashes = _mix(np.arange(n, dtype=np.uint64), words[0], words[1] | np.uint64(1))
            order = np.argsort(hashes)  # takes a quarter of the time of a stable one, which only equal hashes need
            if (hashes[order[1:]] == hashes[order[:-1]]).any():
                order = np.argsort(hashes, kind="stable")
            places = np.empty(n, dtype=np.int64)
            places[order] = np.arange(n)
            self._places = (order.astype(np.int64), places)
        bits = max(2, (n - 1).bit_length())
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits

    def forward(self, places: Int64Array) -> Int64Array:
        if self._places is not None:
            return self._places[0][places]
        return self._walk(places, self._encrypt)

    def inverse(self, samples: Int64Array) -> Int64Array:
        if self._places is not None:
            return self._places[1][samples]
        return self._walk(samples, self._decrypt)

    def _walk(self, values: Int64Array, step: _Step) -> Int64Array:
        # Cycle walking: the cycle that a value lies on leads back below n, in under two steps on average.
        out = step(values.astype(np.uint64))
        outside = np.flatnonzero(out >= self.n)
        while len(outside):
            out[outside] = step(out[outside])
            outside = outside[out[outside] >= self.n]
        return out.astype(np.int64)

    def _encrypt(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high_bits, low_bits = self._high_bits, self._low_bits
        high, low = x >> np.uint64(low_bits), x & np.uint64((1 << low_bits) - 1)
        for i in range(_ROUNDS):
            high, low = low, high ^ self._round(i, low, high_bits)
            high_bits, low_bits = low_bits, high_bits
        return (high << np.uint64(low_bits)) | low

    def _decrypt(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high_bits, low_bits = self._high_bits, self._low_bits  # an even number of rounds: the widths are back
        high, low = x >> np.uint64(low_bits), x & np.uint64((1 << low_bits) - 1)
        for i in reversed(range(_ROUNDS)):
            high, low = low ^ self._round(i, high, low_bits), high
            high_bits, low_bits = low_bits, high_bits
        return (high << np.uint64(low_bits)) | low

    def _round(self, i: int, half: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
        return _mix(half, self._add[i], self._multiply[i]) >> np.uint64(64 - bits)


class _Step(Protocol):
    """One keyed step of the hash: numbers in, numbers out, of the same shape."""

    def __call__(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]: ...


def _mix(x: NDArray[np.uint64], add: np.uint64, multiply: np.uint64) -> NDArray[np.uint64]:
    """Keyed hash of each value; the high bits are the good ones."""
    x = (x + add) * multiply
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xD6E8FEB86659FD93)
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xD6E8FEB86659FD93)
    return x


class KeyedTraces:
    """The order that follows from (seed, epoch): rank r asks for places r, r + W, r + 2W, ... of the permutation.

    With ``drop_last`` the tail that does not divide by the world size W is left out, else it is padded with
    repeats from the start (torch.utils.data.DistributedSampler).
    """

    def __init__(
        self,
        num_samples: int,
        world_size: int = 1,
        *,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.num_samples = num_samples
        self.world_size = world_size
        self._length = num_samples // world_size if drop_last else -(-num_samples // world_size)
        self._permutation = KeyedPermutation(num_samples, f"refill epoch order {seed} {epoch}") if shuffle else None

    @classmethod
    def of_job(cls, spec: JobSpec, epoch: int, num_samples: int) -> KeyedTraces:
        """Of a job whose order is keyed."""
        how: dict[str, Any] = {"seed": spec.seed, "shuffle": spec.shuffle, "drop_last": spec.drop_last}
        return cls(num_samples, spec.world_size, epoch=epoch, **how)

    @property
    def num_ranks(self) -> int:
        return self.world_size

    def length(self, rank: int) -> int:
        return self._length

    @property
    def longest(self) -> int:
        return self._length

    def asked(self, rank: int, positions: Int64Array) -> tuple[Int64Array, NDArray[np.bool_]]:
        places = positions * self.world_size + rank
        repeats = places >= self.num_samples
        return self._samples_at(places % self.num_samples), repeats

    def in_step(self, start: int, end: int) -> tuple[Int64Array, Int64Array, NDArray[np.bool_]]:
        places = np.arange(start * self.world_size, min(end, self._length) * self.world_size, dtype=np.int64)
        return places, self._samples_at(places % self.num_samples), places >= self.num_samples

    def _samples_at(self, places: Int64Array) -> Int64Array:
        return places if self._permutation is None else self._permutation.forward(places)

    def position_of(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        places = samples if self._permutation is None else self._permutation.inverse(samples)
        return places % self.world_size, places // self.world_size

    def repeats_of(self, first: int, end: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        samples, ranks, positions = self._padding
        inside = (samples >= first) & (samples < end)
        return samples[inside], ranks[inside], positions[inside]

    @cached_property
    def _padding(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        places = np.arange(self.num_samples, max(self.num_samples, self._length * self.world_size), dtype=np.int64)
        ranks, positions = places % self.world_size, places // self.world_size
        return self._samples_at(places % self.num_samples), ranks, positions

    def members(self, first: int, end: int) -> NDArray[np.bool_] | None:
        return None


class ExplicitTraces:
    """Traces that clients posted, for samplers of their own: subsets, weights, any order.

    Redirection stays within the samples that the epoch asks for, so a training split never sees a sample of the
    validation split. Of positions that ask for the same sample, the first in (rank, position) order is the request
    and the others are repeats.

    It costs 4 bytes a position beside the trace itself, up to 8 for each sample, and a byte for what repeats
    (:mod:`refill_service.cache_core.posted_traces`).

    :param traces: for every rank its samples, ``(length,)``; kept as they are. Raises :class:`InvalidInput` for an id
        that the dataset does not have.
    """

    def __init__(self, num_samples: int, traces: Mapping[int, IdArray]) -> None:
        self._traces = {rank: np.ascontiguousarray(traces[rank]) for rank in sorted(traces)}
        for rank, trace in self._traces.items():
            check_ids(num_samples, rank, trace)
        everything = np.concatenate(list(self._traces.values())) if self._traces else np.empty(0, dtype=np.int64)
        self._members, first_places = np.unique(everything, return_index=True)
        self._first_places = first_places.astype(np.int32 if len(everything) < 2**31 else np.int64)
        repeats = np.ones(len(everything), dtype=bool)
        repeats[self._first_places] = False
        self._ends = np.cumsum([len(trace) for trace in self._traces.values()])
        self._repeats = dict(zip(self._traces, np.split(repeats, self._ends[:-1]), strict=True))

    @property
    def num_ranks(self) -> int:
        return len(self._traces)

    def length(self, rank: int) -> int:
        return len(self._traces[rank])

    @property
    def longest(self) -> int:
        return max(map(len, self._traces.values()), default=0)

    def asked(self, rank: int, positions: Int64Array) -> tuple[Int64Array, NDArray[np.bool_]]:
        return self._traces[rank][positions].astype(np.int64), self._repeats[rank][positions]

    def in_step(self, start: int, end: int) -> tuple[Int64Array, Int64Array, NDArray[np.bool_]]:
        parts = [trace[start:end] for trace in self._traces.values()]
        positions = np.concatenate([np.arange(start, start + len(part)) for part in parts])
        nth_rank = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        times = positions * len(parts) + nth_rank
        order = np.argsort(times)
        repeats = np.concatenate([each[start:end] for each in self._repeats.values()])
        return times[order], np.concatenate(parts).astype(np.int64)[order], repeats[order]

    def members(self, first: int, end: int) -> NDArray[np.bool_] | None:
        inside = self._members[np.searchsorted(self._members, first) : np.searchsorted(self._members, end)]
        wanted = np.zeros(end - first, dtype=bool)
        wanted[inside - first] = True
        return wanted

    def position_of(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        return self._at(self._first_places[np.searchsorted(self._members, samples)])

    def repeats_of(self, first: int, end: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        samples, places = self._repeated
        here = slice(*np.searchsorted(samples, (first, end)))
        return samples[here].astype(np.int64), *self._at(places[here])

    @cached_property
    def _repeated(self) -> tuple[IdArray, IdArray]:
        """Samples and places of the repeats, by sample. Policies that keep the order ask for them, and receipts."""
        places = np.concatenate(list(self._repeats.values()) or [np.empty(0, dtype=bool)]).nonzero()[0]
        samples = np.concatenate(list(self._traces.values()) or [np.empty(0, dtype=np.int64)])[places]
        order = np.argsort(samples, kind="stable")
        return samples[order], places[order].astype(self._first_places.dtype)

    def _at(self, places: IdArray) -> tuple[Int64Array, Int64Array]:
        """``(ranks, positions)``."""
        places = places.astype(np.int64)
        nth = np.searchsorted(self._ends, places, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        return np.array(list(self._traces), dtype=np.int64)[nth], places - starts[nth]


def check_ids(num_samples: int, rank: int, trace: IdArray) -> None:
    """Raises :class:`InvalidInput` for an id that the dataset does not have."""
    if len(trace) and not 0 <= int(trace.min()) <= int(trace.max()) < num_samples:
        wrong = trace[(trace < 0) | (trace >= num_samples)]
        raise InvalidInput(f"trace of rank {rank} asks for sample {wrong[0]}; there are 0 to {num_samples - 1}")
