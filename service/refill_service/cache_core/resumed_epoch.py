"""What is left of an epoch that a job goes on with from a checkpoint, with other ranks or other pods?

What the training run had consumed at the checkpoint is *done*; all else of the epoch is dealt anew to the ranks that
there are now, whatever was delivered after the checkpoint was saved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from refill.errors import RefillError
from refill.protocol.incarnation import line_of
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.epoch_order import KeyedTraces, RestTraces, Traces
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = [
    "NOT_KNOWN_HERE",
    "ResumedEpoch",
    "consumed_at_pod",
    "consumed_before",
    "consumed_in_all",
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
    """Raises :class:`RefillError` for what no pod has encoded."""
    text, _, done = encoded.partition(b"\n")
    try:
        facts = json.loads(text)
        found = ResumedEpoch(done=np.frombuffer(done, dtype="<i8"), **facts)
        if not isinstance(found.incarnation, str):
            raise TypeError(f"its incarnation is {found.incarnation!r:.100}")
        for name in ("epoch", "position", "unknown"):
            if type(facts.get(name, 0)) is not int:
                raise TypeError(f"its {name} is {facts[name]!r:.100}")
    except (RecursionError, TypeError, ValueError) as error:
        raise RefillError(f"a pod says how a job was resumed, but not as pods do: {error}") from error
    return found


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


NOT_KNOWN_HERE = np.array([0, 0, -1], dtype=np.int64)
"""In place of what :func:`consumed_at_pod` returns, of a pod that does not know the job."""


def consumed_at_pod(
    epoch: int,
    position: int,
    answered: Iterable[tuple[Int64Array, Int64Array]],
    traces: Traces,
    world_size: int,
    resumed: ResumedEpoch | None,
    moves: int,
) -> Int64Array:
    """What a pod knows of the samples that were consumed up to a position. First three numbers: how many there must be
    over all pods, how many the epoch has, and how often the job had moved. Then their ids."""
    before = resumed.done if resumed is not None and resumed.epoch == epoch else np.empty(0, dtype=np.int64)
    parts = [consumed_before(position, asked, samples, traces) for asked, samples in answered]
    expected = len(before) + min(position * world_size, traces.num_requests)
    return np.concatenate([[expected, len(before) + traces.num_requests, moves], before, *parts])


def consumed_in_all(answers: Sequence[Int64Array]) -> tuple[Int64Array, int, int] | None:
    """``(ids of the samples that were consumed, how many there must be, how many the epoch has)``, of what all pods
    know. None: none knows the job."""
    # Samples that were assigned before the last move, and not received, were dealt to others by it.
    newest = max(int(answer[2]) for answer in answers)
    if newest < 0:
        return None
    answers = [answer for answer in answers if answer[2] == newest]
    expected, requests = (max(int(answer[place]) for answer in answers) for place in range(2))
    return np.unique(np.concatenate([answer[3:] for answer in answers])), expected, requests


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
