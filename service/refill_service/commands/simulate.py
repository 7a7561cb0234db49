"""``refill simulate``: what do the epochs of a job read? Arguments in, a table or JSON out."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refill.errors import InvalidInput, MemoryTooSmall
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_memory import asked_at_once
from refill.protocol.policies import POLICIES, terms_of
from refill_service.commands.amounts import whole

if TYPE_CHECKING:
    from refill_service.cache_core.epoch_order import Traces
    from refill_service.planning.simulated_job import EpochReads, SimulatedJob
    from refill_service.planning.swept_jobs import Sweep

_SAMPLES, _EPOCHS = 131_072, 3
_SWEPT_SAMPLE_BYTES = 100_000
"""Of a sweep: what stands beside a sample that is kept for others counts, too."""
_OF_LIVE = ("window", "remote_memory_samples", "group_order")


def add_commands(commands: Any) -> None:
    from refill_service.commands.analyze_sweep import add_sweep_options
    from refill_service.planning.simulated_job import LOOP_BATCH

    parser = commands.add_parser(
        "simulate",
        description="Simulate epochs of a job with the code that decides in pods, without a store or a network, and "
        "print what each of them reads. Ranks are in step, reads arrive at once, and a sample counts as one byte, so "
        "that memory is in samples. docs/GLOSSARY.md explains the words.",
        epilog="examples: refill simulate --samples 131072 --chunk-size 64 --pods 3; refill simulate --policy exact "
        "--set eviction=lru --samples 131072 --memory-samples 13107 --pods 1 --epochs 2",
    )
    parser.add_argument(
        "--policy",
        choices=sorted(POLICIES),
        default=JobSpec.policy,
        help="; ".join(f"{name}: {terms.label}" for name, terms in sorted(POLICIES.items()))
        + " (default: %(default)s)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the policy, as in policy_settings of a job; may be given several times. "
        + "; ".join(_settings_help(name) for name in sorted(POLICIES)),
    )
    parser.add_argument(
        "--samples",
        type=whole(1),
        help=f"number of samples of the dataset (default: {_SAMPLES}; with --trace as its largest id says)",
    )
    parser.add_argument(
        "--chunk-size", type=whole(1), default=64, metavar="K", help="samples that are read together (default: 64)"
    )
    parser.add_argument("--pods", type=whole(1), default=3, help="number of pods (default: 3)")
    parser.add_argument("--ranks", type=whole(1), metavar="R", help="number of ranks (default: one for each pod)")
    parser.add_argument(
        "--memory-samples",
        type=whole(1),
        metavar="C",
        help="how many samples each pod has memory for (default: a tenth of the dataset over all pods, a chunk at "
        "least)",
    )
    parser.add_argument("--epochs", type=whole(1), metavar="E", help=f"how many epochs (default: {_EPOCHS})")
    parser.add_argument(
        "--batch",
        type=whole(1),
        default=LOOP_BATCH,
        metavar="B",
        help="positions that a rank asks for at once (default: %(default)s, about what training loops ask pods for)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="the order, one sample id a line, dealt to ranks in turn: epochs of n lines if each n lines are a "
        "permutation or --epochs says so, else one order of any length. The next epoch is known, too, which it is not "
        "where ranks post lists (default: the order of --seed)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the job (default: 0)")
    live = parser.add_argument_group("policies that send samples ahead")
    live.add_argument(
        "--window",
        type=whole(0),
        metavar="P",
        help="how far ahead a pod looks for samples to send: this many of a rank's next requests to it; 0: it sends "
        f"none (default: {JobSpec.prefetch_window})",
    )
    live.add_argument(
        "--remote-memory-samples",
        type=whole(0),
        metavar="L",
        help="how many samples a home pod can hold of those that other pods send ahead (default: 10000)",
    )
    live.add_argument(
        "--group-order",
        choices=["consecutive", "interleaved"],
        help="which chunks are read into the same part of memory: neighbours, or chunks far apart (default: "
        "consecutive)",
    )
    add_sweep_options(parser, "epoch by epoch")
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: a table)")
    parser.set_defaults(func=_run)


def _settings_help(policy: str) -> str:
    names = ", ".join(f"{each.name} ({each.about})" for each in terms_of(policy).settings)
    return f"{policy}: {names}".replace("%", "%%")


def _run(args: argparse.Namespace) -> int:
    from refill_service.commands.analyze_sweep import sweep_of

    sweep = sweep_of(args)
    job, head, num_epochs, again = _job(args)
    if sweep is None:
        epochs = _with_progress(job, num_epochs)
    else:
        epochs = _swept(args, sweep, again)
        head |= {"sweep": sweep.num_jobs, "behind": sweep.behind}
    if args.json:
        print(json.dumps(head | {"epochs": [epoch.to_dict() for epoch in epochs]}))
        return 0
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in head.items() if name != "settings"))
    print(", ".join(f"{name} {value}" for name, value in head["settings"].items()))
    print(
        "epoch       GETs  of 64 samples  samples read  of the dataset         hits       misses  held at most"
        "       remote   sent ahead"
    )
    for each in epochs:
        positions = max(1, each.hits + each.misses)
        remote = "".join("            -" if n is None else f" {n:12,}" for n in (each.remote_requests, each.sent_ahead))
        print(
            f"{each.epoch:5} {each.gets:10,} {each.gets / positions * 64:14.3f} {each.samples_read:13,} "
            f"{each.samples_read / head['samples']:14.4f}x {each.hits:12,} {each.misses:12,} "
            f"{each.held_peak:13,}{remote}"
        )
    return 0


def _job(args: argparse.Namespace) -> tuple[SimulatedJob, dict[str, Any], int, tuple[Any, ...]]:
    """The job, what is said of it, how many epochs to run, and what it was made of."""
    import numpy as np

    from refill_service.planning.simulated_job import SimulatedJob, SimulatedPods

    if args.policy == "planned":
        for name in _OF_LIVE:
            if getattr(args, name) is not None:
                raise InvalidInput(
                    f"--{name.replace('_', '-')} does not go with --policy planned, which sends none ahead"
                )
    num_samples, num_epochs = _SAMPLES if args.samples is None else args.samples, args.epochs
    orders: list[Traces] = []
    ranks = args.pods if args.ranks is None else args.ranks
    if args.trace is not None:
        num_samples, orders, num_epochs = _orders(args.trace, args.samples, args.epochs, ranks)
    num_epochs = _EPOCHS if num_epochs is None else num_epochs
    a_chunk = min(args.chunk_size, num_samples)
    memory = args.memory_samples or max(a_chunk, num_samples // 10 // args.pods)
    if memory < a_chunk:
        raise MemoryTooSmall(
            f"memory too small: --memory-samples {memory} does not hold a chunk of {a_chunk} samples: raise it, or "
            "lower --chunk-size"
        )
    fields = {field.name for field in dataclasses.fields(JobSpec)}
    given = _settings(args.policy, args.set)
    spec = JobSpec(
        "simulated",
        "memory://simulated",
        world_size=ranks,
        seed=args.seed,
        order="explicit" if orders else "keyed",
        chunk_size=args.chunk_size,
        group_order=args.group_order or JobSpec.group_order,
        policy=args.policy,
        policy_settings={name: value for name, value in given.items() if name not in fields},
        prefetch_window=JobSpec.prefetch_window if args.window is None else args.window,
        **{name: value for name, value in given.items() if name in fields},
    )
    remote = 10_000 if args.remote_memory_samples is None else args.remote_memory_samples
    at_once = asked_at_once(args.batch, ranks, 1, args.pods)
    made_of = (
        spec,
        np.array([0, num_samples], dtype=np.int64),
        np.ones(num_samples, dtype=np.int64),
        SimulatedPods(args.pods, memory, remote, at_once),
        num_epochs,
    )
    job = SimulatedJob.of(*made_of, batch_size=args.batch, orders=orders)
    settings = spec.settings_of_policy()
    if job.plan is not None:
        settings |= {"plan_bytes": job.plan.memory_bytes, "shares": job.plan.num_shares, "run": job.plan.run}
    head = {
        "policy": args.policy,
        "settings": settings,
        "samples": num_samples,
        "memory_samples": memory,
        "chunk_size": args.chunk_size,
        "pods": args.pods,
        "ranks": ranks,
        "batch_size": args.batch,
    }
    return job, head, num_epochs, made_of


def _swept(args: argparse.Namespace, sweep: Sweep, made_of: tuple[Any, ...]) -> list[EpochReads]:
    from refill_service.planning.swept_jobs import swept_epochs

    if args.policy != "planned" or args.trace is not None:
        raise InvalidInput("--sweep goes with --policy planned and without --trace: other jobs do not share reads")
    return swept_epochs(sweep, *made_of, batch_size=args.batch, unit_bytes=_SWEPT_SAMPLE_BYTES)


def _settings(policy: str, given: Sequence[str]) -> dict[str, Any]:
    """By name; a value is what JSON says, else a text. The policy's table says whether it has such a setting."""
    found: dict[str, Any] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals:
            raise InvalidInput(f"--set takes NAME=VALUE, got {each!r}")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    terms_of(policy).settings_with(policy, found)
    return found


def _orders(
    path: Path, num_samples: int | None, num_epochs: int | None, num_ranks: int
) -> tuple[int, list[Traces], int]:
    """``(samples, the order of each epoch, epochs)`` of a file."""

    from refill_service.planning.listed_orders import dealt, orders_of_file

    num_samples, orders = orders_of_file(path, num_samples, num_epochs)
    return num_samples, dealt(orders, num_samples, num_ranks), len(orders)


def _with_progress(job: SimulatedJob, num_epochs: int) -> list[EpochReads]:
    from rich.console import Console
    from rich.progress import Progress

    console, found = Console(stderr=True), []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for number in range(num_epochs):
            task = bar.add_task(f"epoch {number}", total=None)
            for places, _ in job.epoch(number):
                bar.advance(task, len(places))
            bar.remove_task(task)
            found.append(job.reads(number))
    return found
