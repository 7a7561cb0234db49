"""``refill analyze --ranks``: what each pod of a very large planned job has to do; a table or JSON out."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from refill.errors import InvalidInput
from refill_service.commands.amounts import size, size_of
from refill_service.planning.pod_sizing import CPU_SECONDS_PER_GB

if TYPE_CHECKING:
    from refill_service.planning.scale import PodLimits, Scaled, ScaleShape

_BATCH = 32
"""Of a rank, where none is given."""


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "very large jobs",
        "With --ranks nothing is simulated: what each pod of a planned job has to do, and what it runs short of "
        "first. Needs --samples and --samples-per-second in place of DATASET.",
    )
    group.add_argument("--ranks", type=int, metavar="R", help="ranks that train, however many the pods")
    group.add_argument(
        "--blob-size", type=size(1), default="64MB", metavar="SIZE", help="how large blobs are (default: 64MB)"
    )
    group.add_argument(
        "--pod-cores", type=float, default=4, metavar="N", help="cores that each pod has (default: %(default)s)"
    )
    group.add_argument(
        "--pod-network",
        type=float,
        default=3125,
        metavar="MB/S",
        help="how fast the network of each pod is, each way (default: %(default)s: 25 Gbit/s)",
    )
    group.add_argument(
        "--max-connections", type=int, metavar="N", help="that setting of pods (default: as pods have it)"
    )
    group.add_argument(
        "--cpu-ms-per-1000-samples",
        type=float,
        default=0.0,
        metavar="MS",
        help="CPU that a pod takes for 1,000 samples, beside that for their bytes: for samples that are much smaller "
        "than 100 kB, as `make bench-pods-scale` measures it (default: 0)",
    )
    group.add_argument(
        "--cpu-seconds-per-gb",
        type=float,
        default=CPU_SECONDS_PER_GB,
        metavar="S",
        help="and for each GB (default: %(default)s, of samples of 100 kB, by `make bench-cores`)",
    )


def run_scale(args: argparse.Namespace) -> int:
    from refill_service.planning.analysis import StoreTerms
    from refill_service.planning.scale import PodLimits, ScaleShape, scaled
    from refill_service.settings import Settings, default_pod_memory

    if args.dataset is not None or args.samples is None or args.compute_samples_per_second is None:
        raise InvalidInput("--ranks needs --samples and --samples-per-second, and no DATASET")
    for option, value in (
        ("--ranks", args.ranks),
        ("--pod-cores", args.pod_cores),
        ("--pod-network", args.pod_network),
    ):
        if value <= 0:
            raise InvalidInput(f"{option} must be more than 0, got {value}")
    batch = _BATCH if args.batch_size is None else max(1, args.batch_size // args.ranks)
    shape = ScaleShape(
        args.samples,
        size_of("--sample-bytes", args.sample_bytes),
        args.pods,
        args.ranks,
        args.compute_samples_per_second,
        batch,
        args.workers or 0,
        args.blob_size,
        args.seed,
    )
    limits = PodLimits(
        default_pod_memory(size_of("--pod-memory", args.pod_memory or "64GiB"), args.pods),
        StoreTerms(
            latency_seconds=args.store_latency / 1000,
            bytes_per_second=args.store_bandwidth * 1e6,
            concurrency=args.concurrency,
        ),
        args.max_connections or int(Settings.model_fields["max_connections"].default),
        args.pod_cores,
        args.pod_network * 1e6,
        args.cpu_ms_per_1000_samples / 1e6,
        args.cpu_seconds_per_gb,
    )
    found = scaled(shape, limits)
    if args.json:
        print(json.dumps({"pods": args.pods, "ranks": args.ranks, "batch": batch, **found.to_dict()}))
    else:
        _print(shape, limits, found)
    return 0


def _print(shape: ScaleShape, limits: PodLimits, found: Scaled) -> None:
    from refill_service.datasets.progress import bytes_text as text

    total = shape.num_samples * shape.sample_bytes
    rate = shape.samples_per_second * shape.sample_bytes
    print(
        f"{shape.num_samples:,} samples of {text(shape.sample_bytes)}, {text(total)}; {shape.num_ranks:,} ranks, "
        f"batches of {shape.batch}, {shape.samples_per_second:,.0f} samples/s, {text(rate)}/s; {shape.num_pods:,} pods"
    )
    print(f"chunks of {found.chunk_size}, {found.num_shares:,} shares; a batch asks {found.pods_of_batch:.1f} pods")
    print("the pod that has most to do:")
    rows = [
        ("shares, samples", f"{found.shares_of_pod}, {found.samples_of_pod:,}"),
        ("requests", f"{found.requests_per_second:,.1f}/s"),
        ("to training", f"{text(found.sent_bytes_per_second)}/s"),
        ("from the store", f"{text(found.store_bytes_per_second)}/s, {found.gets_per_second:,.1f} GETs/s"),
        ("connections", f"{found.connections:,} (one of each loader worker)"),
        ("CPU", f"{found.cores:.2f} cores"),
        ("memory for samples", f"{text(found.memory_bytes)}, the order is planned for {text(found.planned_bytes)}"),
        ("tables of the plan", text(found.plan_tables_bytes)),
        ("index", f"{text(found.index_bytes)}, of which it sets aside {text(found.index_held_bytes)}"),
        ("opening it", f"{found.index_requests:,} GETs, {text(found.index_read_bytes)}"),
        ("planning an epoch", f"{found.planning_seconds:.2f} s of one core (of this machine)"),
        ("start of a job", f"{found.start_seconds:.1f} s to the first answer"),
    ]
    for label, value in rows:
        print(f"  {label:20} {value}")
    print("of what a pod has, it needs:")
    for name, part in sorted(found.needs.items(), key=lambda need: -need[1]):
        print(f"  {name:24} {part:8.1%}{'   TOO MUCH' if part > 1 else ''}")
    if found.lacks is not None:
        print(found.lacks)
    print(f"the bottleneck: {found.bottleneck}")
