"""What is left of an epoch that a job goes on with from a checkpoint, with other ranks or other pods?

What the training run had consumed at the checkpoint is *done*; all else of the epoch is dealt anew to the ranks that
there are now, whatever was delivered after the checkpoint was saved.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from refill.protocol.incarnation import line_of
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.epoch_order import KeyedTraces, RestTraces, Traces
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = [
    "ResumedEpoch",
    "consumed_before",
    "decode_resumed",
    "epoch_resumed",
    "is_resumed",
    "keyed_traces",
    "resumed_incarnation",
]

_MARK = "-resumed"


@dataclass(frozen=True)
class ResumedEpoch:
    """How a job was resumed.

    :param incarnation: the line of the job before it.
    :param position: up to which each of its ranks had consumed the epoch, exclusive.
    :param done: ``(n,)`` ids of the samples that were consumed, ascending.
    :param unknown: how many more were consumed that nobody knows: they come again.
    """

    incarnation: str
    epoch: int
    position: int
    done: Int64Array
    unknown: int = 0

    def encode(self) -> bytes:
        """For other pods: a line of JSON, then the ids."""
        facts = {name: value for name, value in vars(self).items() if name != "done"}
        return json.dumps(facts).encode() + b"\n" + self.done.astype("<i8").tobytes()


def decode_resumed(encoded: bytes) -> ResumedEpoch:
    facts, _, done = encoded.partition(b"\n")
    return ResumedEpoch(done=np.frombuffer(done, dtype="<i8"), **json.loads(facts))


def keyed_traces(spec: JobSpec, epoch: int, num_samples: int, resumed: ResumedEpoch | None) -> Traces:
    """The traces of an epoch of a job whose order is keyed."""
    done = resumed.done if resumed is not None and resumed.epoch == epoch else None
    order = KeyedTraces(
        num_samples if done is None else num_samples - len(done),
        spec.world_size,
        seed=spec.seed,
        epoch=epoch,
        shuffle=spec.shuffle,
        drop_last=spec.drop_last,
    )
    return order if done is None else RestTraces(num_samples, done, order)


def consumed_before(position: int, asked: Int64Array, samples: Int64Array, traces: Traces) -> Int64Array:
    """Of the requests ``asked``, which ``samples`` answered: the samples that ranks had consumed when each of them had
    come to ``position``."""
    if not len(asked):
        return samples
    _, positions = traces.position_of(asked)
    return np.unique(samples[positions < position])


def resumed_incarnation(incarnation: str, epoch: int, position: int, world_size: int, num_pods: int) -> str:
    """The same for every rank that resumes from the same step, so that the first one resumes the job for all."""
    what = f"{incarnation} {epoch} {position} {world_size} {num_pods}"
    return f"{hashlib.blake2b(what.encode(), digest_size=16).hexdigest()}{_MARK}{epoch}"


def is_resumed(incarnation: str) -> bool:
    """Whether a registration can't be understood without its :class:`ResumedEpoch`."""
    return _MARK in line_of(incarnation)


def epoch_resumed(incarnation: str) -> int | None:
    """The epoch within which a job was resumed, as the name of its registration says; None: it does not."""
    _, mark, epoch = line_of(incarnation).partition(_MARK)
    return int(epoch) if mark and epoch.isdecimal() else None
