"""What do jobs of a sweep read together? Jobs with one ``read_seed``, other seeds and as much memory, on the same pods.

What one of them reads another one takes, or not, by the code that decides so in pods (``planned_pods.py``). They go in
step, each as far behind the one before it as is said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from refill.errors import InvalidInput
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.sample_mapping import Int64Array
from refill_service.planning.planned_pods import KeptForOthers
from refill_service.planning.simulated_job import LOOP_BATCH, EpochReads, SimulatedJob, SimulatedPods
from refill_service.settings import default_pod_memory

_READ_SEED = 0
_MOST_JOBS = 1000


class Sweep(NamedTuple):
    num_jobs: int
    behind: float = 0.0
    """Each job behind the one before it, in parts of what its order is planned for."""

    def check(self) -> None:
        """Raises :class:`InvalidInput`."""
        if not 1 <= self.num_jobs <= _MOST_JOBS:
            raise InvalidInput(f"a sweep has 1 to {_MOST_JOBS} jobs, got {self.num_jobs}")
        if not 0 <= self.behind < float("inf"):
            raise InvalidInput(f"a job is 0 or more of what memory holds behind another one, got {self.behind:g}")


def swept_epochs(
    sweep: Sweep,
    spec: JobSpec,
    first_sample: Int64Array,
    lengths: Int64Array,
    pods: SimulatedPods,
    num_epochs: int,
    *,
    batch_size: int = LOOP_BATCH,
    unit_bytes: int = 1,
) -> list[EpochReads]:
    """What each epoch read, of all jobs together: of each epoch of theirs, whenever a job came to it.

    :param spec: of the first job; its seed is drawn from on. ``pods``: with their memory for samples of each job.
    :param unit_bytes: what a byte of ``lengths``, and of memory, stands for.
    :param first_sample: and the rest as of :meth:`SimulatedJob.of`, which says what is raised, too.
    """
    sweep.check()
    sample_bytes = unit_bytes * int(lengths.sum()) / max(1, len(lengths))
    kept = KeptForOthers(_kept_bytes(pods, unit_bytes, sample_bytes), unit_bytes)
    jobs = [
        SimulatedJob.of(
            replace(spec, seed=spec.seed + number, read_seed=_READ_SEED),
            first_sample,
            lengths,
            pods,
            num_epochs,
            batch_size=batch_size,
            kept=kept,
        )
        for number in range(sweep.num_jobs)
    ]
    assert jobs[0].plan is not None
    behind = int(sweep.behind * len(lengths) * jobs[0].plan.memory_bytes / max(1, int(lengths.sum())))
    found = _run(jobs, behind, num_epochs)
    return [_together([of_job[epoch] for of_job in found]) for epoch in range(num_epochs)]


def _kept_bytes(pods: SimulatedPods, unit_bytes: int, sample_bytes: float) -> int:
    """What a job keeps for others on a pod that gives it so much for samples."""
    parts = default_pod_memory(1, pods.num_pods).parts(sample_bytes, planned=True, in_sweep=True)
    whole = replace(parts, memory_bytes=1 << 50)
    return int(unit_bytes * pods.memory_bytes * whole.sweep_bytes / whole.abstract_bytes)


def _run(jobs: Sequence[SimulatedJob], behind: int, num_epochs: int) -> list[list[EpochReads]]:
    found: list[list[EpochReads]] = [[] for _ in jobs]
    asked: list[float] = [0.0 for _ in jobs]
    """Positions so far; infinite: it is done."""
    running = [_asks(job, num_epochs, reads) for job, reads in zip(jobs, found, strict=True)]
    while asked[-1] != float("inf"):
        for number, job in enumerate(running):
            if asked[number] != float("inf") and (number == 0 or asked[number] + behind <= asked[number - 1]):
                asked[number] += next(job, float("inf"))
    return found


def _asks(job: SimulatedJob, num_epochs: int, found: list[EpochReads]) -> Iterator[int]:
    """Positions of each batch."""
    for number in range(num_epochs):
        for places, _ in job.epoch(number):
            yield len(places)
        found.append(job.reads(number))


def _together(reads: Sequence[EpochReads]) -> EpochReads:
    def total(name: str) -> int | None:
        counts = [getattr(each, name) for each in reads]
        return None if None in counts else sum(counts)

    names = (each.name for each in dataclasses.fields(EpochReads) if each.name != "epoch")
    return EpochReads(reads[0].epoch, **{name: total(name) for name in names})  # type: ignore[arg-type]
