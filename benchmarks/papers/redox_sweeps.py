"""Brand Fig. 12 to 14 and Table 6, Redox Fig. 5 and 6: what chunk size and remote memory change.

    python -m benchmarks.papers.redox_sweeps [--part 64]

Three nodes, one part of ImageNet-1k with the same part of memory, remote memory and window as in Table 6; ranks ask in
batches. Times are those of SqueezeNet by the clock of ``end_to_end.py``, before its store that is bound by requests.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from benchmarks.papers.end_to_end import REQUESTS, SAMPLE_BYTES, SQUEEZENET, Setup, epoch, scaled_hours
from benchmarks.papers.page import Curve, Part, Row, print_rows
from benchmarks.papers.table6 import NUM_PODS, NUM_SAMPLES, SEED, WINDOW

from refill.protocol.job_spec import JobSpec
from refill_service.planning.simulated_job import SimulatedJob, SimulatedPods

__all__ = ["LIMITS", "SIZES", "Swept", "Timed", "part_of_page", "swept", "timed"]

SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
LIMITS = (0.05, 0.5, 1.0, 1.5, 2.0, 3.0)
"""GB of remote memory, as in the papers; a sample has 100 KB."""
LIMIT_HOURS = (0.77, 0.71, 0.65, 0.63, 0.66, 0.68)
"""Of an epoch, as Brand Table 6 has them."""
SAMPLE_GB = SAMPLE_BYTES / 1e9
BATCH = 32
_PART = 64


@dataclass(frozen=True)
class Swept:
    loads: float
    """Of each chunk, on average."""
    remote_peak: float
    """The most of what was sent ahead that the fullest node held, as a part of the dataset."""
    remote_requests: float
    """As a part of the samples."""


def swept(chunk_size: int, remote_gb: float, part: int, batch_size: int = BATCH) -> Swept:
    num_samples = NUM_SAMPLES // part
    spec = JobSpec(
        "sweep",
        "memory://imagenet",
        world_size=NUM_PODS,
        seed=SEED,
        chunk_size=chunk_size,
        policy="redox",
        prefetch_window=WINDOW // part,
    )
    pods = SimulatedPods(NUM_PODS, num_samples // 10 // NUM_PODS, round(remote_gb / SAMPLE_GB / part))
    blob, lengths = np.array([0, num_samples], dtype=np.int64), np.ones(num_samples, dtype=np.int64)
    job = SimulatedJob.of(spec, blob, lengths, pods, 1, batch_size=batch_size, key=f"simulation {SEED}")
    peak = 0
    for _ in job.epoch(0):
        peak = max(peak, job.most_sent_ahead())
    reads = job.reads(0)
    loads = reads.gets * chunk_size / num_samples
    return Swept(loads, peak / num_samples, (reads.remote_requests or 0) / num_samples)


@dataclass(frozen=True)
class Timed:
    hours: float
    """Of an epoch."""
    mb_per_second: float
    """Read from the store, by all nodes."""


def timed(chunk_size: int, remote_gb: float, part: int) -> Timed:
    """:param chunk_size: 1: PyTorch without a cache."""
    system, setup = "redox" if chunk_size > 1 else "PyTorch", Setup(model=SQUEEZENET)
    of_redox = {"chunk_size": chunk_size, "remote_memory_samples": round(remote_gb / SAMPLE_GB / part)}
    found = epoch(system, REQUESTS, math.inf, part, setup, **of_redox if chunk_size > 1 else {})
    read_mb = found.samples_read * SAMPLE_BYTES / 1e6
    return Timed(scaled_hours(found, part, setup), read_mb / (found.run_seconds or math.inf))


def part_of_page(part: int = _PART) -> Part:
    by_size = {size: swept(size, 1.0, part) for size in SIZES}
    by_limit = {limit: swept(64, limit, part) for limit in LIMITS}
    timed_by_size = {size: timed(size, 1.0, part) for size in (1, *SIZES)}
    timed_by_limit = {limit: timed(64, limit, part) for limit in LIMITS}
    sizes, limits = ", ".join(map(str, SIZES)), ", ".join(f"{limit:g}" for limit in LIMITS)
    of_time = "Brand Fig. 13 and 14, Redox Fig. 6"
    used = {limit: found.remote_peak * NUM_SAMPLES * SAMPLE_GB for limit, found in by_limit.items()}
    rows = [
        Row(
            f"K = {sizes}: times each chunk is loaded",
            "rises",
            _texts(found.loads for found in by_size.values()),
            "Brand Fig. 13, Redox Fig. 6(a)",
        ),
        Row(
            f"K = 1 (PyTorch), {sizes}: MB/s read",
            "rises",
            _texts((found.mb_per_second for found in timed_by_size.values()), 0),
            of_time,
        ),
        Row(
            f"K = 1 (PyTorch), {sizes}: hours of an epoch",
            "falls up to 64, then rises",
            _texts(found.hours for found in timed_by_size.values()),
            of_time,
        ),
        Row(
            f"limit {limits} GB: remote memory used by the fullest node, GB",
            "rises up to 1.5, then hardly",
            _texts(used.values()),
            "Brand Fig. 12, Redox Fig. 5",
        ),
        Row(
            f"limit {limits} GB: remote requests for each sample",
            "falls",
            _texts((found.remote_requests for found in by_limit.values()), 3),
            "Brand Fig. 12, Redox Fig. 5",
        ),
        Row(
            f"limit {limits} GB: hours of an epoch",
            _texts(LIMIT_HOURS),
            _texts(found.hours for found in timed_by_limit.values()),
            "Brand Table 6, Redox 5.4",
        ),
    ]
    curves = [
        Curve("chunk_size", "chunk size", "loads of a chunk", {"ours": [(k, v.loads) for k, v in by_size.items()]}),
        Curve(
            "chunk_size_speed", "chunk size", "MB/s", {"ours": [(k, v.mb_per_second) for k, v in timed_by_size.items()]}
        ),
        Curve("chunk_size_hours", "chunk size", "hours", {"ours": [(k, v.hours) for k, v in timed_by_size.items()]}),
        Curve("remote_memory", "limit, GB", "GB used", {"ours": list(used.items())}),
        Curve(
            "remote_memory_hours",
            "limit, GB",
            "hours",
            {
                "ours": [(limit, found.hours) for limit, found in timed_by_limit.items()],
                "paper": list(zip(LIMITS, LIMIT_HOURS, strict=True)),
            },
        ),
    ]
    return Part("Brand and Redox", f"python -m benchmarks.papers.redox_sweeps --part {part}", rows, curves)


def _texts(numbers: Iterable[float], digits: int = 2) -> str:
    return " ".join(f"{number:.{digits}f}" for number in numbers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, default=_PART, choices=range(1, 401), metavar="N")
    print_rows("Brand and Redox, sweeps", part_of_page(parser.parse_args().part).rows)
