"""``refill analyze``: arguments in; a table with a recommended chunk size, JSON or a plot out."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refill.errors import InvalidInput, MemoryTooSmall, RefillError
from refill.protocol.job_spec import JobSpec
from refill_service.commands import analyze_part, analyze_scale, analyze_sweep
from refill_service.commands.amounts import memory_bytes_of, number, size_of, whole, wholes
from refill_service.num_cores import num_cores

if TYPE_CHECKING:
    from refill_service.cache_core.sample_mapping import Int64Array
    from refill_service.object_store.store_settings import StoreSettings
    from refill_service.planning.analysis import Analysis, DatasetShape, Row
    from refill_service.planning.pod_sizing import PodNeeds

_LIVE = "redox"
"""Memory of jobs of the live policies is divided as for this one."""
_BATCH = 256
_PLOT_KINDS = (".png", ".svg")


def add_commands(commands: Any) -> None:
    from refill_service.cache_core.policies.registry import KINDS
    from refill_service.commands.datasets import add_store_options
    from refill_service.planning.analysis import StoreTerms

    parser = commands.add_parser(
        "analyze",
        description="Simulate an epoch for each policy and several chunk sizes, with the code that decides in pods. "
        "Show what "
        "each costs and how well it shuffles, and recommend a chunk size. docs/ANALYZE.md explains every column.",
        epilog="example: refill analyze s3://datasets/imagenet --pods 4 --pod-memory 64GiB --batch-size 1024",
    )
    parser.add_argument("dataset", metavar="DATASET", nargs="?", help="s3://bucket/prefix, file:///folder, or a path")
    parser.add_argument(
        "--samples", type=whole(2), metavar="N", help="in place of DATASET: a made-up dataset of N samples"
    )
    parser.add_argument(
        "--sample-bytes",
        default="100kB",
        metavar="SIZE",
        help="with --samples: how large each one is (default: %(default)s)",
    )
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument(
        "--pod-memory",
        metavar="SIZE",
        help="what each pod has for samples, as memory in the chart and memory_bytes of a pod: 12GiB. Says what a job "
        "that is alone has of it",
    )
    memory.add_argument(
        "--chunk-memory",
        metavar="SIZE",
        help="in its place: memory for chunks alone, of all pods together, the same for all policies: 64GiB, or a part "
        "of the dataset (default: 10%%)",
    )
    parser.add_argument(
        "--pods",
        type=whole(1, 10_000),
        default=1,
        metavar="N",
        help="number of pods, each the home of one rank (default: 1)",
    )
    parser.add_argument(
        "--batch-size",
        type=whole(2),
        metavar="B",
        help="samples of one step, of all ranks together (default: 256; with --ranks 32 for each)",
    )
    parser.add_argument(
        "--workers",
        type=whole(0),
        metavar="W",
        help="workers of each rank's loader: whether what they ask for at once fits beside a planned order (default: "
        "not known)",
    )
    for kind in KINDS.values():
        default_sizes = ",".join(map(str, kind.analysed_chunk_sizes)) or "none"
        if kind.name == JobSpec.policy:
            default_sizes += " and what is recommended"
        parser.add_argument(
            *_chunk_sizes_options(kind.name),
            type=wholes,
            dest=f"chunk_sizes_of_{kind.name}",
            metavar="K,K,...",
            help=f"chunk sizes to try with policy {kind.name} (default: {default_sizes})",
        )
    parser.add_argument(
        "--group-order",
        choices=["consecutive", "interleaved"],
        default="consecutive",
        help="which chunks are read into the same part of memory: neighbours, or chunks far apart (default: "
        "consecutive)",
    )
    order = parser.add_mutually_exclusive_group()
    order.add_argument(
        "--order",
        choices=["keyed", "explicit"],
        default="keyed",
        help="as the job's: explicit if ranks have lists of their own (TraceSampler), here each sample once, drawn "
        "anew in each epoch (default: keyed, which follows from the seed)",
    )
    order.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="the very list, one sample id a line, each once in an epoch, dealt to ranks in turn; after the last epoch "
        "of the file the first comes again. refill simulate takes any list",
    )
    parser.add_argument(
        "--simulate-samples",
        type=whole(2),
        default=131_072,
        metavar="N",
        help="of a dataset with more samples, simulate only N and scale the result (default: 131072)",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the simulated epoch (default: 1)")
    terms = parser.add_argument_group("store terms", "What the store charges, and how fast it is for one pod.")
    default = StoreTerms()
    terms.add_argument(
        "--get-price",
        type=number(0),
        default=default.dollars_per_1000_gets,
        metavar="DOLLARS",
        help="price of 1,000 GETs (default: %(default)s, S3 Standard's list price)",
    )
    terms.add_argument(
        "--gb-price",
        type=number(0),
        default=default.dollars_per_gb,
        metavar="DOLLARS",
        help="price of a GB that leaves the store (default: %(default)s, for pods in the store's region)",
    )
    terms.add_argument(
        "--store-latency",
        type=number(0),
        default=default.latency_seconds * 1000,
        metavar="MS",
        help="time from a GET to its first byte (default: %(default)s)",
    )
    terms.add_argument(
        "--store-bandwidth",
        type=number(1e-3),
        default=default.bytes_per_second / 1e6,
        metavar="MB/S",
        help="how fast one pod reads (default: %(default)s)",
    )
    terms.add_argument(
        "--concurrency",
        type=whole(1),
        default=default.concurrency,
        metavar="N",
        help="how many GETs one pod has under way at once (default: %(default)s)",
    )
    terms.add_argument(
        "--compute-samples-per-second",
        "--samples-per-second",
        type=number(1e-9),
        metavar="RATE",
        help="how fast the whole job trains when it never waits for data: then the table says which rows are too slow "
        "for it",
    )
    run = parser.add_argument_group(
        "a run", "What it costs at each provider: GETs and machines. refill cost has all of it, with storage."
    )
    run.add_argument("--epochs", type=whole(1), metavar="E", help="its epochs (default: nothing is said of a run)")
    run.add_argument(
        "--vm-price", type=number(0), metavar="USD", help="dollars for an hour of one pod's machine (default: 0)"
    )
    analyze_scale.add_options(parser)
    analyze_part.add_options(parser)
    analyze_sweep.add_sweep_options(parser, "in place of all else")
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: a table)")
    parser.add_argument(
        "--plot", metavar="FILE", help="also draw requests against quality of the shuffle, as .png or .svg"
    )
    add_store_options(parser)
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    from refill_service.planning.analysis import recommend, sample_by_sample

    sweep = analyze_sweep.sweep_of(args)
    modes = [name for name in ("ranks", "part", "sweep") if getattr(args, name) is not None]
    if len(modes) > 1:
        raise InvalidInput(
            f"--{modes[0]} does not go with --{modes[1]}: each says something else in place of the table"
        )
    if modes and (args.trace is not None or args.order != "keyed"):
        raise InvalidInput("--order and --trace do not go with --ranks, --part or --sweep, which ask for no lists")
    if args.ranks is not None:
        return analyze_scale.run_scale(args)
    if args.plot:
        _check_plot(Path(args.plot))
    analysis, job_bytes = _analysis(args)
    if args.part is not None or sweep is not None:
        chunk_sizes = _chunk_sizes(args, analysis.shape, JobSpec.policy)
        if sweep is None:
            return analyze_part.print_part(args, analysis, chunk_sizes)
        return analyze_sweep.print_sweep(args, analysis, chunk_sizes, sweep)
    chunk_size, reason = recommend(analysis)
    rows, left_out = _simulated(analysis, _wanted(args, analysis.shape, chunk_size))
    rows.append(sample_by_sample(analysis))
    needs = _needs(analysis)
    if args.json:
        shape = analysis.shape
        print(
            json.dumps(
                {
                    "num_samples": shape.num_samples,
                    "dataset_bytes": shape.total_bytes,
                    "simulated_samples": shape.simulated,
                    "memory_bytes": analysis.memory_bytes,
                    "pods": analysis.num_pods,
                    "pod_memory_bytes": None if analysis.pod is None else analysis.pod.memory_bytes,
                    "pinned_bytes": None if analysis.pod is None else analysis.pod.pinned_bytes,
                    "job_memory_bytes": job_bytes,
                    "needs": None if needs is None else dataclasses.asdict(needs),
                    "batch_size": analysis.batch_size,
                    "order": "explicit" if analysis.orders else "keyed",
                    "group_order": analysis.group_order,
                    "rows": [row.to_dict() for row in rows],
                    "left_out": left_out,
                    "recommended_chunk_size": chunk_size,
                    "planned_memory": analysis.plan_memory.to_dict(),
                    "planned_memory_lacks": analysis.plan_memory.lacks(analysis.at_once_bytes, shape.total_bytes),
                    "stored_by_class": shape.by_class,
                    "posted_ids_bytes": _posted_bytes(shape.num_samples),
                    "reason": reason,
                }
            )
        )
    else:
        _print(analysis, job_bytes, needs, rows, left_out, reason)
    if args.plot:
        from refill_service.planning.analysis_plot import draw_frontier

        draw_frontier(Path(args.plot), analysis, rows, (JobSpec.policy, chunk_size))
    return 0


def _wanted(args: argparse.Namespace, shape: DatasetShape, recommended: int) -> list[tuple[str, int]]:
    """Each policy with the chunk sizes to try; the default one with what is recommended, too, where none are given."""
    from refill_service.cache_core.policies.registry import KINDS

    sizes = {name: _chunk_sizes(args, shape, name) for name in KINDS}
    if getattr(args, f"chunk_sizes_of_{JobSpec.policy}") is None:
        sizes[JobSpec.policy] = sorted({*sizes[JobSpec.policy], recommended})
    return [(name, k) for name, of_policy in sizes.items() for k in of_policy]


def _chunk_sizes(args: argparse.Namespace, shape: DatasetShape, policy: str) -> list[int]:
    """Those to try with a policy. Rows that are decoded a group at a time leave no choice."""
    from refill_service.cache_core.policies.registry import kind_of

    given: list[int] | None = getattr(args, f"chunk_sizes_of_{policy}")
    # Somebody who gave none is not told of those that his small dataset has no blobs for.
    usual = sorted({min(size, shape.largest_blob) for size in kind_of(policy).analysed_chunk_sizes})
    sizes = usual if given is None else given
    if shape.group_samples is None or not sizes:
        return sizes
    if given is not None and given != [shape.group_samples]:
        raise InvalidInput(
            f"{_chunk_sizes_options(policy)[0]} {','.join(map(str, given))}: a chunk of {args.dataset} is a row group "
            f"or record batch, up to {shape.group_samples:,} rows: leave it out"
        )
    return [shape.group_samples]


def _chunk_sizes_options(policy: str) -> list[str]:
    """Those of the default policy need no name."""
    named = f"--{policy}-chunk-sizes"
    return ["--chunk-sizes", named] if policy == JobSpec.policy else [named]


def _analysis(args: argparse.Namespace) -> tuple[Analysis, int]:
    """What to analyse, and the ``memory_bytes`` that a job has on each pod, or needs for that."""
    from refill_service.cache_core.job_memory import memory_for_chunks
    from refill_service.planning.analysis import Analysis, StoreTerms
    from refill_service.planning.pod_sizing import job_alone
    from refill_service.settings import default_pod_memory

    if args.vm_price is not None and args.epochs is None:
        raise InvalidInput("--vm-price goes with --epochs: the cost is of a run")
    shape = _shape(args)
    orders = _orders(args, shape)
    pod = None
    if args.pod_memory is not None:
        pod = default_pod_memory(size_of("--pod-memory", args.pod_memory), args.pods)
        of_dataset = (shape.num_samples, shape.total_bytes)
        job_memory = job_alone(pod, _LIVE, 1, *of_dataset, has_lists=bool(orders)).memory
        memory_bytes = job_memory.abstract_bytes * args.pods
        if memory_bytes < 1:
            raise InvalidInput(
                f"--pod-memory {args.pod_memory} has no room for samples beside what a job needs: give each pod more, "
                "for example 12GiB"
            )
    else:
        memory_bytes = memory_bytes_of("--chunk-memory", args.chunk_memory or "10%", shape.total_bytes)
        parts = default_pod_memory(0, args.pods).parts(shape.total_bytes / max(1, shape.num_samples), planned=False)
        job_memory = replace(parts, memory_bytes=memory_for_chunks(memory_bytes / args.pods, parts))
    analysis = Analysis(
        shape,
        memory_bytes,
        num_pods=args.pods,
        batch_size=_BATCH if args.batch_size is None else args.batch_size,
        num_workers=args.workers,
        group_order=args.group_order,
        pod=pod,
        remote_bytes=job_memory.remote_bytes,
        store=StoreTerms(
            dollars_per_1000_gets=args.get_price,
            dollars_per_gb=args.gb_price,
            latency_seconds=args.store_latency / 1000,
            bytes_per_second=args.store_bandwidth * 1e6,
            concurrency=args.concurrency,
        ),
        compute_samples_per_second=args.compute_samples_per_second,
        epochs=args.epochs or 0,
        vm_hour=args.vm_price or 0.0,
        seed=args.seed,
        orders=orders,
    )
    return analysis, job_memory.memory_bytes


def _orders(args: argparse.Namespace, shape: DatasetShape) -> list[Int64Array]:
    """The lists that ranks have, of all ranks together, if they have any."""
    import numpy as np

    from refill_service.planning.listed_orders import orders_of_file

    if args.trace is None:
        drawn = np.random.default_rng(args.seed % 2**64)
        return [drawn.permutation(shape.simulated) for _ in range(2 if args.order == "explicit" else 0)]
    if shape.simulated < shape.num_samples:
        raise InvalidInput(f"--trace goes with --simulate-samples {shape.num_samples}: its list is of all samples")
    _, orders = orders_of_file(args.trace, shape.num_samples, None)
    if any(not np.array_equal(np.sort(order), np.arange(shape.num_samples)) for order in orders):
        raise InvalidInput(
            f"trace {args.trace}: analyze takes lists that have each of the {shape.num_samples:,} samples once; refill "
            "simulate says what others read"
        )
    return orders


def _needs(analysis: Analysis) -> PodNeeds | None:
    from refill_service.planning.pod_sizing import pod_needs

    if analysis.pod is None or analysis.compute_samples_per_second is None:
        return None
    shape = analysis.shape
    return pod_needs(analysis.pod, shape.num_samples, shape.total_bytes, analysis.compute_samples_per_second)


def _shape(args: argparse.Namespace) -> DatasetShape:
    from refill_service.commands.datasets import dataset_url, store_settings_of
    from refill_service.planning.analysis import DatasetShape

    if (args.dataset is None) == (args.samples is None):
        raise InvalidInput("name a DATASET or give --samples N, one of them; see refill analyze --help")
    if args.dataset is None:
        return DatasetShape.uniform(args.samples, size_of("--sample-bytes", args.sample_bytes), args.simulate_samples)
    return asyncio.run(_shape_of(dataset_url(args.dataset), store_settings_of(args), args.simulate_samples))


async def _shape_of(url: str, settings: StoreSettings, most_simulated: int) -> DatasetShape:
    """From the index alone: its blobs, and the lengths of its first samples."""
    import numpy as np

    from refill_service.datasets.dataset_reader import Dataset
    from refill_service.planning.analysis import DatasetShape

    dataset = await Dataset.open(url, settings)
    try:
        simulated = min(dataset.num_samples, most_simulated)
        records = await dataset.load_records(0, simulated)
        first_sample = np.unique(np.minimum(dataset.blobs.first_sample, simulated))
        labels = dataset.label_summary
        return DatasetShape(
            dataset.num_samples,
            dataset.index.sample_bytes,
            first_sample,
            records.length,
            by_class=labels is not None and labels.by_class,
            classes_in_pieces=dataset.classes_in_pieces,
            group_samples=dataset.group_samples,
        )
    finally:
        await dataset.close()


def _simulated(analysis: Analysis, wanted: list[tuple[str, int]]) -> tuple[list[Row], list[str]]:
    """The rows that can be had, and for each of the others why not."""
    from rich.console import Console
    from rich.progress import Progress

    from refill_service.commands.fitting_sizes import none_fits
    from refill_service.planning.analysis import analyze

    rows: list[Row] = []
    failures: list[tuple[int, str, RefillError]] = []
    console = Console(stderr=True)
    with (
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
        # An interrupt ends the others at once, and is this process's to report.
        ProcessPoolExecutor(
            min(len(wanted), num_cores()), initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL)
        ) as pool,
    ):
        task = bar.add_task("epochs", total=len(wanted))
        running = [pool.submit(analyze, analysis, policy, chunk_size) for policy, chunk_size in wanted]
        try:
            for (policy, chunk_size), row in zip(wanted, running, strict=True):
                try:
                    rows.append(row.result())
                except (InvalidInput, MemoryTooSmall) as error:
                    failures.append((chunk_size, policy, error))
                bar.advance(task)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    if not rows:
        raise none_fits(analysis, min(failures, key=lambda failure: (failure[1] != _LIVE, failure[0]))[2])
    return rows, [f"{policy} K={chunk_size}: {error}" for chunk_size, policy, error in failures]


def _print(
    analysis: Analysis,
    job_bytes: int,
    needs: PodNeeds | None,
    rows: list[Row],
    left_out: list[str],
    reason: str,
) -> None:
    from rich.console import Console
    from rich.table import Table

    from refill_service.datasets.progress import bytes_text

    shape, store = analysis.shape, analysis.store
    dataset = f"{shape.num_samples:,} samples, {bytes_text(shape.total_bytes)}"
    over = f"{analysis.num_pods} pod{'s' * (analysis.num_pods > 1)}"
    part = f"{analysis.memory_fraction():.1%} of the dataset"
    batches = f"batches of {analysis.batch_size}; {analysis.group_order} groups" + "; lists" * bool(analysis.orders)
    if analysis.pod is None:
        print(
            f"{dataset}; memory for chunks {bytes_text(analysis.memory_bytes)} ({part}) over {over}; {batches}\n"
            f"a job needs memory_bytes={job_bytes} on each pod for that, buffers included"
        )
    else:
        _print_pods(analysis, f"{dataset}; {over}", batches, needs)
    print(
        f"store: ${store.dollars_per_1000_gets:g} for 1,000 GETs, ${store.dollars_per_gb:g} a GB; a pod has"
        f" {store.latency_seconds * 1000:g} ms to the first byte, {store.bytes_per_second / 1e6:g} MB/s,"
        f" {store.concurrency} GETs at once; times are floors"
    )
    if shape.simulated < shape.num_samples:
        print(f"simulated on the first {shape.simulated:,} samples with the same part of memory, and scaled")
    print()
    table = Table(box=None, pad_edge=False)
    for name in ("policy", "K"):
        table.add_column(name)
    for name in (
        "in memory", "GETs", "/64", "bytes read", "cost", "held", "distance", "co-batch", "RL", "of blocks",
        "first batch", "epoch",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    several = analysis.num_pods > 1
    if several:
        table.add_column("beside 1 pod", justify="right")
    for provider in rows[0].run_dollars:
        table.add_column(f"{provider}, {analysis.epochs} ep.", justify="right")
    for row in rows:
        bound = "" if row.io_bound is None else " I/O" if row.io_bound else " compute"
        table.add_row(
            row.policy,
            str(row.chunk_size),
            f"{row.chunks_in_memory:,}" if row.chunks_in_memory else "-",
            f"{row.gets:,.0f}",
            f"{row.gets_per_64_samples:.2f}",
            f"{row.read_amplification:.2f}x",
            f"${row.store_dollars:,.3g}",
            bytes_text(row.held_peak_bytes) if row.held_peak_bytes else "-",
            f"{row.distance:.3f}",
            f"{row.co_batch:.2f}",
            f"{row.randomization_level:.2%}",
            f"{row.block_randomization_level:.2%}",
            _time_text(row.first_batch_seconds),
            _time_text(row.epoch_seconds) + bound,
            *(["-" if row.more_than_one_cache is None else f"{row.more_than_one_cache:+.1%}"] if several else []),
            *(f"${dollars:,.2f}" for dollars in row.run_dollars.values()),
        )
    # A narrow terminal breaks whole lines, which reads better than cells broken one by one.
    Console(width=240, highlight=False, markup=False).print(table)
    print()
    for line in left_out:
        print(f"left out: {line}")
    print(f"recommended: {reason}")
    memory = analysis.plan_memory
    print(
        f"a planned job's memory for samples on each pod, {bytes_text(memory.samples_bytes)}: its order is planned for "
        f"{bytes_text(memory.planned_bytes)}; {bytes_text(memory.loaders_bytes)} for what loaders ask for at once and "
        "what is read ahead"
    )
    if (lacks := memory.lacks(analysis.at_once_bytes, analysis.shape.total_bytes)) is not None:
        print(f"it does not fit: {lacks}")
    print(
        "a job of policy exact whose ranks post their order (TraceSampler, ImportanceSampler) sets "
        f"{bytes_text(_posted_bytes(shape.num_samples))} of its memory on each pod aside for that; a quarter of it at "
        "most"
    )


def _posted_bytes(num_samples: int) -> int:
    """What pods set aside for orders that ranks post."""
    from refill_service.cache_core.posted_traces import trace_memory

    return trace_memory(1 << 62, num_samples)


def _print_pods(analysis: Analysis, what: str, batches: str, needs: PodNeeds | None) -> None:
    from refill_service.cache_core.policies.interface import default_chunk_size
    from refill_service.datasets.progress import bytes_text

    pod, shape = analysis.pod, analysis.shape
    assert pod is not None
    pinned = min(1.0, pod.pinned_bytes * pod.num_pods / shape.total_bytes)
    print(
        f"{what} with {bytes_text(pod.memory_bytes)} for samples each; {batches}\n"
        f"pinned: {bytes_text(pod.pinned_bytes)} on each pod, {pinned:.1%} of the dataset on all: not read again after "
        "the first epoch"
    )
    # What a planned job keeps for its order is about the same for any usual chunk size.
    chunk_size = default_chunk_size(
        shape.num_samples, shape.total_bytes / shape.num_samples, shape.num_samples, by_class=False
    )
    for policy in (JobSpec.policy, _LIVE):
        job = analysis.job_alone(policy, chunk_size)
        parts = {
            "sent ahead": job.memory.remote_bytes,
            "just sent": job.memory.recent_bytes,
            "for its order": job.for_plan_bytes,
        }
        chunks, part = bytes_text(job.memory.abstract_bytes), analysis.memory_fraction(policy, chunk_size)
        print(
            f"a {policy} job, alone: {bytes_text(job.memory_bytes)} on each pod; {chunks} of it for chunks "
            f"({part:.1%} of the dataset on all)"
            + "".join(f", {bytes_text(size)} {name}" for name, size in parts.items() if size)
        )
    if needs is not None:
        received, sent = (8 * num / 1e9 for num in (needs.in_bytes_per_second, needs.out_bytes_per_second))
        extra = f" (extraMemory: {bytes_text(needs.extra_bytes)})" * bool(needs.extra_bytes)
        print(
            f"{needs.samples_per_second:,.0f} samples/s: {bytes_text(needs.bytes_per_second)}/s to training, "
            f"{bytes_text(needs.store_bytes_per_second)}/s from the store; {needs.cores:.1f} cores of all pods\n"
            f"each pod: receives {received:.1f} Gbit/s, sends {sent:.1f} Gbit/s; its container's limit is "
            f"{bytes_text(needs.limit_bytes)}{extra}"
        )


def _time_text(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _check_plot(path: Path) -> None:
    """Before minutes are spent on what can't be drawn."""
    if path.suffix.lower() not in _PLOT_KINDS:
        raise InvalidInput(f"--plot {path}: write a file that ends in .png or .svg")
    if not path.resolve().parent.is_dir():
        raise InvalidInput(f"--plot {path}: there is no folder {path.resolve().parent}")
    from refill_service.planning.analysis_plot import require_matplotlib

    require_matplotlib()
