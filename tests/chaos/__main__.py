"""Tries to break "each sample exactly once an epoch", seed after seed: ``python -m tests.chaos``, or ``make chaos``.

python -m tests.chaos --seconds 120            as many seeds as fit
python -m tests.chaos --seed 17 --policy redox  one run again
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from types import FrameType

from benchmarks.machine import machine
from benchmarks.s3_server import s3_server
from tests.chaos.chaos_dataset import PLANNED_SAMPLES, ChaosDataset, ChaosMixture, dataset_in_s3, mixture_in_s3
from tests.chaos.chaos_run import ChaosRun, repeated_by
from tests.chaos.draw import POLICIES, setting_of
from tests.chaos.kinds import ALL, THEMES
from tests.forked_processes import start_pod

from refill_service.demo import local_cluster

_FAULT_SECONDS = 8.0
_NOT_OF_SWEEPS = ("partitions", "replaced")
"""A run of these may end with all ranks refused, and says of one job alone whether that is right."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Break pods, ranks, network and store.")
    parser.add_argument("--seconds", type=float, default=120, help="begin no further run after this (default: 120)")
    parser.add_argument("--seeds", type=int, help="run this many seeds, however long it takes")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--seed", type=int, help="run this seed alone")
    parser.add_argument("--policy", choices=POLICIES, help="default: by the seed, mostly planned")
    parser.add_argument("--themes", type=_themes, help="such as observers,memory; none; default: by the seed")
    parser.add_argument("--kinds", action="store_true", help="say what can go wrong, and run nothing")
    parser.add_argument("--fault-seconds", type=float, default=_FAULT_SECONDS, help="time in which faults begin, a run")
    parser.add_argument("--keep-going", action="store_true", help="run on after a failure")
    given = parser.parse_args()
    if given.kinds:
        print(*(f"{kind.name:20}{kind.theme and f'({kind.theme})':12} {kind.says}" for kind in ALL.values()), sep="\n")
        return 0
    signal.signal(signal.SIGTERM, _stop)
    local_cluster.start_process = start_pod  # type: ignore[assignment]  # what is used of Popen; imports once for all
    with s3_server() as environment:
        return _run_all(given, environment)


def _run_all(given: argparse.Namespace, environment: Mapping[str, str]) -> int:
    print(machine())
    started, totals, failed, runs = time.monotonic(), Counter[str](), 0, 0
    seed = given.first_seed if given.seed is None else given.seed
    dataset, planned = dataset_in_s3(environment), dataset_in_s3(environment, num_samples=PLANNED_SAMPLES)
    mixed = mixture_in_s3(environment)
    while True:
        setting = setting_of(seed, given.policy, given.themes)
        of_run: ChaosDataset | ChaosMixture = planned if setting.is_planned else dataset
        is_replaced = setting.is_planned and "replaced" in setting.themes
        if setting.is_mixture:
            of_run = ChaosMixture.of_seed(mixture_in_s3(environment) if is_replaced else mixed, seed)
        elif is_replaced:
            of_run = dataset_in_s3(environment, num_samples=PLANNED_SAMPLES)
        run = ChaosRun(setting, of_run, given.fault_seconds)
        outcome = run.run()
        runs += 1
        totals.update(outcome.faults)
        totals.update(deliveries=outcome.deliveries, asked_again=outcome.asked_again, receipts=outcome.verdict.receipts)
        if setting.beside:
            totals["bytes that jobs had from each other"] += outcome.shared_bytes
        totals[f"runs {str(outcome.verdict).split(' ')[0]}"] += 1
        print(
            f"seed {seed}: {setting.policy}, {setting.pods} pods, {setting.ranks} ranks, "
            f"{', '.join(setting.themes)}, {len(run.schedule)} faults, {outcome.seconds:.0f} s: {outcome.verdict}",
            flush=True,
        )
        if outcome.problems:
            failed += 1
            print(outcome.report(run.schedule, repeated_by(setting, given.fault_seconds)), flush=True)
            if not given.keep_going:
                break
        seed += 1
        if given.seed is not None or runs == given.seeds:
            break
        if given.seeds is None and time.monotonic() - started > given.seconds:
            break
    print(f"{runs} runs, {failed} failed; " + ", ".join(f"{what}: {count:,}" for what, count in sorted(totals.items())))
    return 1 if failed else 0


def _themes(names: str) -> tuple[str, ...]:
    given = () if names == "none" else tuple(sorted(names.split(",")))
    if unknown := {*given} - {*THEMES}:
        raise argparse.ArgumentTypeError(f"no theme {', '.join(unknown)}; there are {', '.join(THEMES)}")
    if "sweep" in given and (others := {*given} & {*_NOT_OF_SWEEPS}):
        raise argparse.ArgumentTypeError(f"sweep does not go with {', '.join(sorted(others))}")
    return given


def _stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends a run as Ctrl-C does: with all that it started."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
