"""Brand Fig. 12 to 14, Redox Fig. 5 and 6: what chunk size and remote memory change, by counts.

    python -m benchmarks.papers.redox_sweeps [--part 64]

Three nodes, one part of ImageNet-1k with the same part of memory, remote memory and window as in Table 6; ranks ask in
batches. The papers' epoch times are those of their store: by a clock, ``end_to_end.py`` has some.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from benchmarks.papers.page import Curve, Part, Row, print_rows
from benchmarks.papers.table6 import NUM_PODS, NUM_SAMPLES, SEED, WINDOW

from refill.protocol.job_spec import JobSpec
from refill_service.planning.simulated_job import SimulatedJob, SimulatedPods

__all__ = ["LIMITS", "SIZES", "Swept", "part_of_page", "swept"]

SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
LIMITS = (0.05, 0.5, 1.0, 1.5, 2.0, 3.0)
"""GB of remote memory, as in the papers; a sample has 100 KB."""
SAMPLE_GB = 1e-4
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


def part_of_page(part: int = _PART) -> Part:
    by_size = {size: swept(size, 1.0, part) for size in SIZES}
    by_limit = {limit: swept(64, limit, part) for limit in LIMITS}
    rows = [
        Row(
            f"K = {size}: times each chunk is loaded",
            "rises with K" if size > SIZES[0] else "1 or more",
            f"{found.loads:.2f}",
            "Brand Fig. 13, Redox Fig. 6(a)",
        )
        for size, found in by_size.items()
    ]
    rows += [
        Row(
            f"limit {limit:g} GB: remote memory used by the fullest node, GB; remote requests for each sample",
            "rises below 1.5 GB" if limit < 1.5 else "as at 1.5 GB",
            f"{found.remote_peak * NUM_SAMPLES * SAMPLE_GB:.2f}; {found.remote_requests:.3f}",
            "Brand Fig. 12, Redox Fig. 5",
        )
        for limit, found in by_limit.items()
    ]
    curves = [
        Curve("chunk_size", "chunk size", "loads of a chunk", {"ours": [(k, v.loads) for k, v in by_size.items()]}),
        Curve(
            "remote_memory",
            "limit, GB",
            "GB used",
            {"ours": [(limit, v.remote_peak * NUM_SAMPLES * SAMPLE_GB) for limit, v in by_limit.items()]},
        ),
    ]
    return Part("Brand and Redox", f"python -m benchmarks.papers.redox_sweeps --part {part}", rows, curves)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, default=_PART, choices=range(1, 401), metavar="N")
    print_rows("Brand and Redox, sweeps", part_of_page(parser.parse_args().part).rows)
