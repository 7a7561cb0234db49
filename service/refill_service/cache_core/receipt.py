"""What did an owner deliver in an epoch? Counted from its table of who got what, not from counters kept on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.sample_mapping import Int64Array

_COUNTS = ("requests", "delivered", "duplicates", "missing", "redirected")
_OFTEN = ("never_drawn", "drawn_once", "drawn_twice", "drawn_more")
_MOST_SHOWN = 100
_PRIME_1, _PRIME_2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)


@dataclass(frozen=True)
class EpochReceipt:
    """Counts of requests that are no repeats. ``requests == delivered + missing + damaged``."""

    requests: int = 0
    """What the traces ask of this owner."""
    delivered: int = 0
    duplicates: int = 0
    """Deliveries of a sample that another request got, too."""
    missing: int = 0
    """Requests that nobody made, in an epoch that has not ended, or was broken off."""
    redirected: int = 0
    """Requests that another sample answered than the one they asked for."""
    ranks: dict[int, int] = field(default_factory=dict)
    """Delivered to each rank."""
    samples_digest: int = 0
    """Of which samples were delivered: two epochs in which every sample came once have the same."""
    digest: int = 0
    """Of (rank, position, sample), of all answers and of the repeats that the traces ask for, which get exactly that:
    equal for epochs in which every rank got the same samples in the same order."""
    damaged: int = 0
    """Requests whose sample is damaged, so that the rank went on without it."""
    damaged_samples: tuple[int, ...] = ()
    """Some of these samples, by their ids."""

    @property
    def exact(self) -> bool:
        """Whether every sample came exactly once, but for those that are damaged."""
        return not (self.duplicates or self.missing)

    def without(self, ranks: dict[int, int]) -> EpochReceipt:
        """Less what was assigned to these ranks and never reached them."""
        fewer = sum(ranks.values())
        left = {rank: count - ranks.get(rank, 0) for rank, count in self.ranks.items()}
        return replace(self, delivered=self.delivered - fewer, missing=self.missing + fewer, ranks=left)

    def with_damaged(self, ranks: Sequence[dict[int, int]], named: Sequence[Sequence[int]]) -> EpochReceipt:
        """Less what ranks went on without, of each of several homes: how many, by rank, and which, as far as they are
        named. A rank may have reported two of them."""
        samples = {sample for of_home in named for sample in of_home}
        twice = sum(map(len, named)) - len(samples)
        fewer = min(sum(sum(of_home.values()) for of_home in ranks) - twice, self.delivered)
        left = {rank: max(0, count - sum(each.get(rank, 0) for each in ranks)) for rank, count in self.ranks.items()}
        shown = tuple(sorted(samples)[:_MOST_SHOWN])
        return replace(self, delivered=self.delivered - fewer, damaged=fewer, damaged_samples=shown, ranks=left)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, whose numbers are too short for digests."""
        digests = {"samples_digest": f"{self.samples_digest:016x}", "digest": f"{self.digest:016x}"}
        ranks = {str(rank): count for rank, count in sorted(self.ranks.items())}
        return asdict(self) | {"exact": self.exact, "ranks": ranks} | digests

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> EpochReceipt:
        samples_digest, digest = (int(given[name], 16) for name in ("samples_digest", "digest"))
        ranks = {int(rank): count for rank, count in given["ranks"].items()}
        counts: dict[str, Any] = {name: given[name] for name in _COUNTS}
        return cls(**counts, ranks=ranks, samples_digest=samples_digest, digest=digest)


def receipt_of(
    asked: Int64Array,
    samples: Int64Array,
    first_sample: int,
    end_sample: int,
    traces: Traces,
) -> EpochReceipt:
    """The receipt of an owner of the samples ``[first_sample, end_sample)``.

    :param asked: ``(n,)`` the samples that requests asked for, each once.
    :param samples: ``(n,)`` what they got.
    """
    members = traces.members(first_sample, end_sample)
    everything = np.arange(first_sample, end_sample) if members is None else first_sample + np.flatnonzero(members)
    ranks, positions = traces.position_of(everything)
    lengths = np.array([traces.length(rank) for rank in range(int(ranks.max()) + 1)]) if len(ranks) else ranks
    in_epoch = positions < lengths[ranks]  # else in the tail that was dropped
    everything, ranks, positions = everything[in_epoch], ranks[in_epoch], positions[in_epoch]
    answered = np.isin(everything, asked)
    of_ranks = np.bincount(ranks[answered]) if answered.any() else np.empty(0, dtype=np.int64)
    return EpochReceipt(
        requests=len(everything),
        delivered=int(np.count_nonzero(answered)),
        duplicates=len(samples) - len(np.unique(samples)),
        missing=int(np.count_nonzero(~answered)),
        redirected=int(np.count_nonzero(asked != samples)),
        ranks={rank: int(count) for rank, count in enumerate(of_ranks) if count},
        samples_digest=_sum(_mixed(samples)),
        digest=(_digest(*traces.position_of(asked), samples) + _digest_of_repeats(traces, first_sample, end_sample))
        % 2**64,
    )


def _digest_of_repeats(traces: Traces, first_sample: int, end_sample: int) -> int:
    samples, ranks, positions = traces.repeats_of(first_sample, end_sample)
    return _digest(ranks, positions, samples)


def _digest(ranks: Int64Array, positions: Int64Array, samples: Int64Array) -> int:
    """The same in whatever order they come, and the sum of the parts' digests for all of them."""
    return _sum(_mixed(_mixed(_mixed(samples) ^ positions.astype(np.uint64)) ^ ranks.astype(np.uint64)))


def draws_of(traces: Traces, first_sample: int, end_sample: int) -> dict[str, int]:
    """How often an epoch that was drawn asks for the samples ``[first_sample, end_sample)``."""
    members = traces.members(first_sample, end_sample)
    often = np.ones(end_sample - first_sample, dtype=np.int64) if members is None else members.astype(np.int64)
    repeats, _, _ = traces.repeats_of(first_sample, end_sample)
    often += np.bincount(repeats - first_sample, minlength=len(often))
    return {
        "positions": int(often.sum()),
        "never_drawn": int(np.count_nonzero(often == 0)),
        "drawn_once": int(np.count_nonzero(often == 1)),
        "drawn_twice": int(np.count_nonzero(often == 2)),
        "drawn_more": int(np.count_nonzero(often > 2)),
        "most_often": int(often.max(initial=0)),
    }


def positions_of(parts: Sequence[dict[str, Any]], total: EpochReceipt) -> dict[str, Any]:
    """Of an epoch that was drawn, what its receipt says beside ``total``: what became of its positions, and how often
    samples were drawn. Nothing of others.

    :param total: the receipt of the same parts.
    """
    drawn = [part["draws"] for part in parts if part.get("draws") is not None]
    if not drawn or len(drawn) < len(parts):
        return {}
    found = {name: sum(each[name] for each in drawn) for name in ("positions", *_OFTEN)}
    posted = found.pop("positions")
    repeats = min(sum(part["repeats"] for part in parts), posted - total.requests)
    left = posted - total.delivered - total.damaged - repeats
    of_positions = {
        "posted": posted,
        "delivered": total.delivered + repeats,
        "duplicates": total.duplicates,
        "missing": left,
    }
    distinct = sum(count for name, count in found.items() if name != "never_drawn")
    draws = {"distinct": distinct} | found | {"most_often": max(each["most_often"] for each in drawn)}
    return {"positions": of_positions, "draws": draws, "exact": total.exact and left == 0}


def has_begun(part: dict[str, Any]) -> bool:
    """Whether a pod that reports its part of an epoch was asked for anything in it."""
    return bool(part["begun"])


def sum_of_parts(parts: Sequence[dict[str, Any]]) -> EpochReceipt:
    """What pods report of an epoch, each of its share and of what was sent ahead to it, as JSON has it: before damage
    is told from delivery."""
    total = sum_of_receipts([EpochReceipt.from_dict(part["receipt"]) for part in parts])
    for part in parts:
        total = total.without(_by_rank(part["unused_ahead"]))
    return total


def without_damaged(total: EpochReceipt, parts: Sequence[dict[str, Any]]) -> EpochReceipt:
    """Less what ranks went on without, as pods report it."""
    damaged = [_by_rank(part["damaged"]) for part in parts]
    return total.with_damaged(damaged, [part["damaged_samples"] for part in parts])


def _by_rank(counts: dict[str, int]) -> dict[int, int]:
    return {int(rank): count for rank, count in counts.items()}


def sum_of_receipts(receipts: Sequence[EpochReceipt]) -> EpochReceipt:
    """Of all owners of an epoch: each request and each sample belongs to one of them."""
    ranks: dict[int, int] = {}
    for receipt in receipts:
        for rank, count in receipt.ranks.items():
            ranks[rank] = ranks.get(rank, 0) + count
    sums: dict[str, Any] = {name: sum(getattr(receipt, name) for receipt in receipts) for name in _COUNTS}
    return EpochReceipt(
        **sums,
        ranks=ranks,
        samples_digest=sum(receipt.samples_digest for receipt in receipts) % 2**64,
        digest=sum(receipt.digest for receipt in receipts) % 2**64,
    )


def _mixed(values: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """A hash of each value, whatever its order (the finaliser of xxHash64)."""
    x = values.astype(np.uint64) + np.uint64(1)
    x ^= x >> np.uint64(33)
    x *= _PRIME_2
    x ^= x >> np.uint64(29)
    x *= _PRIME_1
    return x ^ (x >> np.uint64(32))


def _sum(values: NDArray[np.uint64]) -> int:
    return int(values.sum(dtype=np.uint64))
