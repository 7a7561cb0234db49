"""Do pods stay as they are for hours? ``make soak``, or ``python -m tests.chaos.soak --minutes 60``.

Jobs of two ranks come and go on three pods, two beside one another, planned and live; every few minutes a pod is killed
and comes back, which ends live jobs. Pod 0 never is, so that there is one process to watch from the beginning to the
end. Every few seconds each pod's memory, file descriptors and threads are written to a CSV. Every job's deliveries are
checked.

Memory is *flat* when the 95 % interval of the trend of the resident set, over the last two thirds of the time, lies
below the bound; it *grows* when the interval lies above. Between the two the run was too short to tell.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import httpx
from benchmarks.machine import machine
from benchmarks.s3_server import s3_server
from tests.chaos.chaos_dataset import ChaosDataset, dataset_in_s3
from tests.chaos.epoch_orders import PlannedOrder
from tests.chaos.ground_truth import GroundTruth
from tests.chaos.memory_trend import trend_of
from tests.chaos.planned_truth import Leg, PlannedTruth
from tests.chaos.pod_samples import PodSample, read_csv, sample_of, write_csv
from tests.chaos.rank import RankPlan, read_begun
from tests.chaos.rank_process import RankProcess
from tests.chaos.soak_plot import plot

from refill_service.demo.local_cluster import LocalCluster

PODS = 3
RANKS = 2
LANES = 2
EPOCHS = 4
MEMORY_BYTES = 48 << 20
NUM_SAMPLES = 1920
_SAMPLE_SECONDS = 3.0
_RESTART_SECONDS = 180.0
_STUCK_SECONDS = 300.0
_STEP_SECONDS = 0.05


class SoakJob:
    """One job from its beginning to its end."""

    def __init__(self, cluster: LocalCluster, dataset: ChaosDataset, folder: Path, number: int) -> None:
        self.name = f"soak-{number}-{uuid.uuid4().hex[:6]}"
        self._began = time.monotonic()
        self._cluster, self._dataset, self._folder = cluster, dataset, folder / self.name
        self._folder.mkdir()
        spec = {
            "name": self.name,
            "dataset": dataset.url,
            "world_size": RANKS,
            "seed": number,
            "policy": ("planned", "redox")[number % 2],
            "chunk_size": 16,
            "memory_bytes": MEMORY_BYTES // 4,
        }
        self._ranks = [
            RankProcess(
                RankPlan(
                    service=cluster.pod_urls[(number + rank) % PODS],
                    home=cluster.pod_urls[(number + rank) % PODS],
                    spec=spec,
                    rank=rank,
                    epochs=EPOCHS,
                    file=f"{self._folder}/rank-{rank}",
                    seed=number,
                    step_seconds=_STEP_SECONDS,
                )
            )
            for rank in range(RANKS)
        ]

        self._is_planned = spec["policy"] == "planned"
        self._may_be_lost = False

    def a_pod_was_killed(self) -> None:
        """Fact."""
        self._may_be_lost = not self._is_planned

    @property
    def done(self) -> bool:
        """Whether its ranks have had all, or have been told that it is lost."""
        return all(rank.done or (self._may_be_lost and _is_lost(rank.failure)) for rank in self._ranks)

    def problems(self) -> list[str]:
        """What went wrong until now, and of a job that is done, all that did."""
        said = [failure for rank in self._ranks if (failure := rank.failure) is not None]
        failures = [f"{self.name}: {failure}" for failure in said if not (self._may_be_lost and _is_lost(failure))]
        if not self.done:
            stuck = time.monotonic() - self._began > _STUCK_SECONDS
            return failures + [f"{self.name} was not done after {_STUCK_SECONDS:.0f} s"] * stuck
        if said:
            return failures
        return failures + [f"{self.name}: {problem}" for problem in self._checked()]

    def _checked(self) -> list[str]:
        files = [Path(rank.plan.file) for rank in self._ranks]
        if not self._is_planned:
            return GroundTruth(files, self._dataset.checksums).check(EPOCHS)
        begun = read_begun(str(files[0]))
        assert begun is not None
        assert begun.plan is not None
        order, batch = PlannedOrder(self._dataset, begun.plan), self._ranks[0].plan.batch
        truth = PlannedTruth(Leg(files), self._dataset.checksums, order, batch, drop_last=False)
        return truth.damaged + [problem for epoch in range(EPOCHS) for problem in truth.problems_of(epoch)]

    def end(self) -> None:
        for rank in self._ranks:
            rank.stop()
        with contextlib.suppress(httpx.TransportError):
            httpx.delete(f"{self._cluster.pod_urls[0]}/v1/jobs/{self.name}", timeout=30)
        shutil.rmtree(self._folder, ignore_errors=True)


class Soak:
    """The run: jobs, restarts, samples."""

    def __init__(self, environment: Mapping[str, str], minutes: float) -> None:
        self.samples: list[PodSample] = []
        self.problems: list[str] = []
        self.jobs_done = 0
        self.restarts: list[tuple[float, int]] = []
        """``(seconds, pod)``"""
        self._environment = environment
        self._seconds = 60 * minutes

    def run(self) -> None:
        dataset = dataset_in_s3(self._environment, num_samples=NUM_SAMPLES, most_bytes=60_000)
        with contextlib.ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="soak-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            settings: dict[str, str | int | float] = {"memory_bytes": MEMORY_BYTES}
            cluster = stack.enter_context(LocalCluster(PODS, folder, settings, dict(self._environment)))
            jobs: list[SoakJob] = []
            stack.callback(_end_all, jobs)
            self._began = time.monotonic()
            next_sample = 0.0
            while (now := time.monotonic() - self._began) < self._seconds and not self.problems:
                for job in [job for job in jobs if job.done]:
                    self.problems += job.problems()
                    job.end()
                    jobs.remove(job)
                    self.jobs_done += 1
                while len(jobs) < LANES:
                    jobs.append(SoakJob(cluster, dataset, folder, self.jobs_done + len(jobs)))
                self.problems += [problem for job in jobs for problem in job.problems()]
                if now > _RESTART_SECONDS * (len(self.restarts) + 1) and now + _RESTART_SECONDS < self._seconds:
                    pod = 1 + len(self.restarts) % (PODS - 1)
                    cluster.kill(pod)
                    cluster.restart(pod, wait=False)
                    for job in jobs:
                        job.a_pod_was_killed()
                    self.restarts.append((now, pod))
                if now >= next_sample:
                    next_sample = now + _SAMPLE_SECONDS
                    self._look(cluster, now)
                time.sleep(0.1)

    def _look(self, cluster: LocalCluster, now: float) -> None:
        for pod, url in enumerate(cluster.pod_urls):
            life = sum(restarted == pod for _, restarted in self.restarts)
            found = sample_of(now, pod, life, cluster.processes[pod].pid, url)
            if found is not None:
                self.samples.append(found)


def _is_lost(failure: str | None) -> bool:
    return failure is not None and "JobLost: " in failure and "Traceback" not in failure


def _end_all(jobs: list[SoakJob]) -> None:
    for job in jobs:
        job.end()


def report(samples: list[PodSample], bound_bytes: float) -> bool:
    """Print the longest life of each pod's process; False when pod 0 grows by more than the bound an hour."""
    print(f"{'':8}{'minutes':>8}{'RSS, MB':>17}{'MB/hour':>9}{'95 %':>17}{'files':>13}{'threads':>12}")
    verdict = "open"
    for pod in sorted({sample.pod for sample in samples}):
        lives = [sample.life for sample in samples if sample.pod == pod]
        of_life = [sample for sample in samples if (sample.pod, sample.life) == (pod, max(set(lives), key=lives.count))]
        try:
            trend = trend_of([sample.seconds for sample in of_life], [sample.rss_bytes for sample in of_life])
        except ValueError:
            continue
        minutes = (of_life[-1].seconds - of_life[0].seconds) / 60
        rss = _thirds([sample.rss_bytes / 1e6 for sample in of_life])
        interval = f"{trend.low / 1e6:.1f} to {trend.high / 1e6:.1f}"
        files = _thirds([sample.file_descriptors for sample in of_life])
        threads = _thirds([sample.threads for sample in of_life])
        print(f"pod {pod:<4}{minutes:8.1f}{rss:>17}{trend.slope / 1e6:9.1f}{interval:>17}{files:>13}{threads:>12}")
        if pod == 0:
            verdict = trend.verdict(bound_bytes)
    found = {
        "flat": "grows by less than",
        "grows": "GROWS by more than",
        "open": "the run was too short to tell whether it grows by",
    }[verdict]
    print(f"memory of pod 0: {found} {bound_bytes / 1e6:g} MB an hour")
    return verdict != "grows"


def _thirds(values: Sequence[float]) -> str:
    """The means of the middle and the last third."""
    third = len(values) // 3
    middle, last = values[third : 2 * third], values[2 * third :]
    return f"{sum(middle) / len(middle):.0f} -> {sum(last) / len(last):.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--csv", type=Path, default=Path("soak.csv"), help="default: soak.csv")
    parser.add_argument("--plot", type=Path, help="an SVG of it")
    parser.add_argument("--bound-mb-per-hour", type=float, default=8.0, help="growth that is too much (default: 8)")
    parser.add_argument("--report", action="store_true", help="of the CSV that is there; run nothing")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    problems: list[str] = []
    if not given.report:
        print(f"{machine()}; {PODS} pods of {MEMORY_BYTES >> 20} MiB, {given.minutes:g} minutes", flush=True)
        with s3_server() as environment:
            soak = Soak(environment, given.minutes)
            try:
                soak.run()
            finally:
                write_csv(given.csv, soak.samples)
        problems = soak.problems
        print(f"{soak.jobs_done} jobs of {EPOCHS} epochs, {len(soak.restarts)} pods killed, {len(problems)} problems")
        print(*problems, sep="\n", end="\n" * bool(problems))
    samples = read_csv(given.csv)
    if given.plot is not None:
        plot(samples, given.plot)
    return 0 if report(samples, given.bound_mb_per_hour * 1e6) and not problems else 1


def _stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the run as Ctrl-C does: with all that it started."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
