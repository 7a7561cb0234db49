"""Does a job stay exact while everything around it fails? One run: pods, ranks, relays, a schedule, a verdict.

The verdict comes from what the ranks wrote down, and the pods' own receipts must agree with it. A live job may be lost
with the memory of a pod: then all its ranks have to be told, and others begin it anew.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import re
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from tests.chaos.beside import JobBeside
from tests.chaos.chaos_dataset import ChaosDataset, ChaosMixture
from tests.chaos.draw import schedule_of
from tests.chaos.epoch_orders import EpochOrder, ListedOrder, MixedOrder, PlannedOrder, plan_id_of
from tests.chaos.ground_truth import GroundTruth
from tests.chaos.kinds import ALL
from tests.chaos.legs import Checkpoint, Legs
from tests.chaos.planned_truth import PlannedTruth, plan_ids_of, wrong_bytes_of
from tests.chaos.rank import RankPlan
from tests.chaos.rank_process import RankProcess
from tests.chaos.receipts import Receipts
from tests.chaos.schedule import Fault, Setting
from tests.chaos.store_relay import StoreFaults, store_relay
from tests.chaos.tcp_relay import Link, Relay
from tests.chaos.verdict import Verdict
from tests.ordered_cluster import OrderedCluster
from tests.waiting import until

from refill.errors import PodUnreachable

__all__ = ["ChaosRun", "Outcome", "repeated_by"]

_BATCH = 16
_MOST_RANKS = 4
_GRACE_SECONDS = 120.0
"""After the last fault is healed, so long may pass in which no rank receives anything: pods that nobody answers are
given up after less. How long all of it takes depends on what else the machine does."""
_FAST = 0.25
"""Of the pause between two batches, for a rank that is ahead of the others."""
_QUIET_SECONDS = 5.0
"""In which ranks bring their job back to pods that were restarted."""
_END_SECONDS = 5.0
_LOG_LINES = 15
_SHARED_BYTES = re.compile(r"^refill_bytes_shared_total\S* (\S+)$", re.MULTILINE)


@dataclass
class Outcome:
    """What became of a run."""

    setting: Setting
    verdict: Verdict
    done: list[tuple[float, str]]
    """What was done to it, and when: seconds from its beginning."""
    faults: Counter[str] = field(default_factory=Counter)
    """How often each kind came about."""
    deliveries: int = 0
    asked_again: int = 0
    shared_bytes: int = 0
    """That jobs of a sweep had from each other, at pods that have lived since."""
    logs: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        return self.verdict.problems

    def report(self, schedule: Sequence[Fault], repeat: str) -> str:
        """All that helps to find out what went wrong."""
        return "\n".join(
            [
                f"FAILED: {self.setting}",
                *(f"  {problem}" for problem in self.problems),
                "planned:",
                *(f"  {fault}" for fault in schedule),
                "done:",
                *(f"  {at:6.2f} s  {what}" for at, what in self.done),
                *self.logs,
                f"again: {repeat}",
            ]
        )


def repeated_by(setting: Setting, fault_seconds: float) -> str:
    """The command of a run with the same faults at the same times; what pods make of them may differ."""
    return (
        f"python -m tests.chaos --seed {setting.seed} --policy {setting.policy} "
        f"--fault-seconds {fault_seconds:g} --themes {','.join(setting.themes) or 'none'}"
    )


class ChaosRun:
    """One run. Everything it starts ends with it, however it ends. Kinds of faults use what is public."""

    cluster: OrderedCluster
    relay: Relay
    store: StoreFaults
    folder: Path

    def __init__(self, setting: Setting, dataset: ChaosDataset | ChaosMixture, seconds: float) -> None:
        self.setting = setting
        self.schedule = schedule_of(setting, seconds)
        self.down: set[int] = set()
        """Pods that are not to be touched: somebody brings them back."""
        self.ranks_down: set[int] = set()
        """So of ranks."""
        self.job_is_lost = False
        """Whether pods have lost their memory of a live job, and not all its ranks have been told."""
        self.dataset = dataset
        self.name = _new_name()
        """Of the job."""
        self._seconds = seconds
        self._todo: list[tuple[float, int, str, Callable[[], None]]] = []
        """What is to be done next: when, a number of its own, what, how."""
        self._numbers = itertools.count()
        self._verdict = Verdict()
        self._outcome = Outcome(setting, self._verdict, [])
        self._has_lost = False
        """Whether receipts of earlier epochs may lack something: pods or ranks have lost what they knew."""
        self._bystanders: list[RankProcess] = []
        self.beside: list[JobBeside] = []
        """The other jobs of a sweep."""
        self._starts = 0
        """How often a job was begun, or begun anew."""
        self._registered_apart = False
        self._plan_before = ""
        """The plan of the first dataset, when that was replaced."""
        self._replacement: ChaosDataset | ChaosMixture | None = None
        """What has taken the place of the dataset that the job began with."""
        self._started_at = 0.0
        """When a pod was started again, last."""
        self._legs = self._new_legs(self.name, setting.seed)

    def _new_legs(self, name: str, seed: int, pace: float = 1.0) -> Legs:
        self._starts += 1
        plan_of = partial(self._plan, name, seed, pace, self._starts)
        return Legs(plan_of, seed, self.dataset.num_positions, drop_last=self.setting.drop_last)

    def run(self) -> Outcome:
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.store = stack.enter_context(store_relay(self.dataset.endpoint, self.setting.seed))
            self.relay = stack.enter_context(Relay())
            self._pod_links: dict[tuple[int, int], Link] = {}
            self.cluster = stack.enter_context(self._pods())
            self._rank_links = [
                [self.relay.link(int(url.rpartition(":")[2])) for url in self.cluster.pod_urls]
                for _ in range(_MOST_RANKS)
            ]
            stack.callback(self._stop_all)
            self._receipts = Receipts(self.cluster)
            self._legs.begin(self.setting.ranks)
            for _ in range(self.setting.beside):
                self.begin_beside(self.setting.beside_pace)
            self._let_it_run()
            if self._verdict.refused and self.setting.is_planned:
                self._judge_refused()
            elif not self._verdict.problems and not self._verdict.refused:
                self._judge()
            self._verdict.pods_said(
                [path.read_text(errors="replace") for path in sorted(self.folder.glob("pod-*.log"))]
            )
            if self._verdict.problems:
                self._outcome.logs = self._last_logs()
        self._outcome.seconds = time.monotonic() - started
        return self._outcome

    @property
    def ranks(self) -> list[RankProcess]:
        return self._legs.ranks

    def _links(self) -> list[Link]:
        return [*self._pod_links.values(), *itertools.chain.from_iterable(self._rank_links)]

    def links_of_rank(self, rank: int) -> list[Link]:
        return self._rank_links[rank]

    def links_of_pods(self, from_pod: int, to_pod: int) -> list[Link]:
        link = self._pod_links.get((from_pod, to_pod))
        return [] if link is None else [link]

    @property
    def is_over(self) -> bool:
        """Whether the ranks of the job have had all."""
        return all(process.done for process in self.ranks)

    @property
    def ranks_have_begun(self) -> bool:
        return self._legs.have_begun

    def home_url(self, rank: int, pod: int) -> str:
        if not self.setting.has_home:
            return ""
        if self.setting.unix_socket and rank == 0:
            return f"unix:{self.folder}/pod-{pod}.sock"
        return self._url(rank, pod)

    def take_down(self, pod: int) -> bool:
        """The pod is the caller's until it brings it back. False: it is somebody else's, or there is none."""
        if pod in self.down or pod >= len(self.cluster.processes):
            return False
        self.down.add(pod)
        return True

    @property
    def is_quiet(self) -> bool:
        """Whether no pod is away, or was until a moment ago, and all reach each other."""
        whole = not any(link.cut for link in self._links())
        return whole and not self.down and time.monotonic() - self._started_at > _QUIET_SECONDS

    def has_started(self, *pods: int) -> None:
        """Fact: these pods were started again."""
        self._started_at = time.monotonic()
        self.down -= set(pods)
        self._has_lost = True
        for job in self.beside:
            job.has_lost = True

    def start_later(self, fault: Fault, pod: int) -> None:
        def start() -> None:
            self.cluster.restart(pod, wait=False)
            self.has_started(pod)

        self.then(fault, f"pod {pod} starts", start)

    def then(self, fault: Fault, what: str, do: Callable[[], None]) -> None:
        """When the fault ends, or after as long again."""
        self._do_at(time.monotonic() - self._began + fault.seconds, what, do)

    def rank_was_killed(self) -> None:
        """Fact: what it has not reported is known to nobody."""
        self._has_lost = True

    def loses_job(self) -> None:
        """Fact: pods are about to lose their memory of a live job."""
        self.job_is_lost = True

    def checkpoint(self) -> Checkpoint | None:
        """Of the job where it is now; None when it has no further to go."""
        found = self._legs.checkpoint()
        return None if found is None or found.epoch >= self.setting.epochs else found

    def stop_ranks(self) -> None:
        """All are killed; somebody begins a leg, or restarts them. Bystanders go with them."""
        self.ranks_down = set(range(len(self.ranks)))
        self._has_lost = True
        self._legs.stop()
        for process in self._bystanders:
            process.kill()
        self._bystanders = []

    def restart_rank(self, rank: int, home: str) -> None:
        """After it was killed. Where nobody but pods knows by which plan its samples came, it begins anew: perhaps by
        another one, as pods may have been lost, too."""
        if self.setting.is_planned and not self._legs.goes_on_without(rank):
            self.ranks[rank].forget()
        self.ranks[rank].restart(home)

    def restart_ranks(self, homes: Sequence[str]) -> None:
        """After :meth:`stop_ranks`. Where none has saved a state, they begin anew, perhaps by another plan."""
        if self.setting.is_planned and not self._legs.have_saved:
            for process in self.ranks:
                process.forget()
        for process, home in zip(self.ranks, homes, strict=True):
            process.restart(home)
        self.ranks_down.clear()

    def begin_leg(self, num_ranks: int, checkpoint: Checkpoint) -> None:
        self._legs.begin(num_ranks, checkpoint)
        self.ranks_down.clear()

    def begin_another_job(self) -> None:
        """Its ranks start with no state, after :meth:`stop_ranks`. What was of the job before is looked at now."""
        self._verdict.problems += wrong_bytes_of(self._files, self.dataset.checksums)
        if len(by_plan := plan_ids_of(self._files)) > 1:
            self._verdict.problems.append(f"ranks went by these plans: {by_plan}")
        self.name = _new_name()
        self._reads_the_replacement()
        self._has_lost = False
        self._registered_apart = True
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._legs = self._new_legs(self.name, self.setting.seed)
        self._legs.begin(self.setting.ranks)
        self.ranks_down.clear()

    def begin_beside(self, pace: float) -> None:
        """One more job of the sweep, with a seed and ranks of its own.

        :param pace: its pauses between two batches, in those of the first job.
        """
        name, number = _new_name(), len(self.beside) + 1
        job = JobBeside(name, self._new_legs(name, self.setting.seed + number, pace), self.setting.seed + number)
        job.legs.begin(1 + number % 2)
        self.beside.append(job)

    def end_at_pods(self, job: JobBeside) -> None:
        """As ``refill end`` does it, which may not reach them."""
        names = [job.name]
        if isinstance(self.dataset, ChaosMixture):
            names = [f"{job.name}.{dataset}" for dataset in self.dataset.datasets]
        for name in names:
            with contextlib.suppress(httpx.TransportError):
                httpx.delete(f"{self.cluster.pod_urls[0]}/v1/jobs/{name}", timeout=_END_SECONDS)

    def registers_apart(self) -> None:
        """Fact: a rank may be refused from now on, by name."""
        self._registered_apart = True

    def replace_dataset(self) -> None:
        """From now on every rank is to end with an error that names the dataset, and none to get other bytes."""
        before = self._legs.plan
        self._plan_before = "" if before is None else plan_id_of(before)
        self._replacement = self.dataset.replaced()

    def _began_since(self, rank: RankProcess) -> bool:
        """Whether it has done all by the plan of what has taken the dataset's place: it was killed before it saved a
        state, and began anew."""
        return rank.done and any(plan != self._plan_before for plan in plan_ids_of([Path(rank.plan.file)]))

    def _judge_refused(self) -> None:
        """Bytes of one dataset never came as those of the other."""
        began_since = {Path(rank.plan.file) for rank in self.ranks if self._began_since(rank)}
        for path in self._files:
            for plan in plan_ids_of([path]):
                is_new = path in began_since and plan != self._plan_before
                dataset = self._replacement if is_new and self._replacement is not None else self.dataset
                self._verdict.problems += wrong_bytes_of([path], dataset.checksums, plan)
        if len(by_plan := plan_ids_of([path for path in self._files if path not in began_since])) > 1:
            self._verdict.problems.append(f"ranks went by these plans: {by_plan}")

    def _reads_the_replacement(self) -> None:
        """Fact: a job reads what has taken the place of the first dataset, if anything has, and nothing else."""
        if self._replacement is not None:
            self.dataset, self._replacement = self._replacement, None

    @property
    def dataset_replaced(self) -> bool:
        return self._replacement is not None

    def add_bystander(self, kind: str, rank: int) -> None:
        """See :mod:`tests.chaos.bystander`. Returns when a twin knows the job: one that asks for the first time after
        all pods have lost all begins another run of that name. Who only looks begins none, whenever it comes."""
        number = sum(self._outcome.faults[kind] for kind in ("observer", "twin"))
        plan = self.ranks[rank].plan
        file, tmp = f"{self.folder}/{kind}-{number}", f"{self.folder}/tmp-{kind}-{number}"
        plan = replace(plan, file=file, tmp=tmp, workers=int(kind == "twin"), timeout_seconds=1)
        self._bystanders.append(RankProcess(plan, "bystander"))
        if kind == "twin":
            until(Path(f"{file}.knows").exists, "a twin that knows the job")

    def _stop_all(self) -> None:
        of_others = [process for job in self.beside for process in job.legs.ranks]
        for process in [*self.ranks, *of_others, *self._bystanders]:
            process.stop()

    def _pods(self) -> OrderedCluster:
        setting = self.setting
        settings: dict[str, str | int | float] = {
            "memory_bytes": "4MiB",
            "pinned_fraction": setting.pinned_fraction,
            "wait_seconds": 2,
            "peer_timeout_seconds": 10,
        }
        if setting.pinned_disk:
            settings |= {"pinned_dir": f"{self.folder}/pinned-{{ordinal}}", "pinned_dir_bytes": "1MiB"}
        if setting.beside:
            settings["memory_bytes"] = "6MiB"
            settings["job_memory_fraction"] = 0.25  # each finds a part, also one that comes again
        if setting.unix_socket:
            settings["unix_socket"] = f"{self.folder}/pod-{{ordinal}}.sock"
        environment = dict(self.dataset.environment) | {
            "AWS_ENDPOINT_URL": self.store.url,
            "REFILL_STORE_FIRST_BACKOFF_SECONDS": "0.02",
            "REFILL_STORE_MAX_BACKOFF_SECONDS": "0.2",
            "REFILL_STORE_REQUEST_TIMEOUT_SECONDS": "10",
        }
        return OrderedCluster(setting.pods, self.folder, settings, environment, self._peer_url)

    def _peer_url(self, from_pod: int, to_pod: int, url: str) -> str:
        if (from_pod, to_pod) not in self._pod_links:
            self._pod_links[from_pod, to_pod] = self.relay.link(int(url.rpartition(":")[2]))
        return f"http://127.0.0.1:{self._pod_links[from_pod, to_pod].port}"

    def _plan(self, name: str, seed: int, pace: float, start: int, leg: int, rank: int, num_ranks: int) -> RankPlan:
        setting = self.setting
        is_apart = "apart" in setting.themes
        mixture: dict[str, Any] | None = None
        if isinstance(self.dataset, ChaosMixture):
            urls = {name: each.url for name, each in self.dataset.datasets.items()}
            mixture = {"datasets": urls, **self.dataset.how}
        fast = 0 if setting.is_planned else _FAST
        # With less than the dataset no rank begins an epoch before all are near the end of the one before.
        memory_bytes = 2_000_000 if is_apart else 900_000 if setting.is_mixture else 600_000
        spec = {
            "name": name,
            "dataset": "mixture" if mixture else self.dataset.url,
            "world_size": num_ranks,
            "seed": seed,
            "drop_last": setting.drop_last,
            "policy": setting.policy,
            "chunk_size": setting.chunk_size,
            "order": setting.order,
            "memory_bytes": memory_bytes * setting.names_memory,
        } | ({"read_seed": setting.seed} if setting.beside else {})
        steps = setting.epochs * self.dataset.num_positions / num_ranks / _BATCH / setting.workers
        return RankPlan(
            service=self._url(rank, (setting.home_of(rank) + setting.is_planned) % setting.least_pods),
            home=self.home_url(rank, setting.home_of(rank)),
            spec=spec,
            rank=rank,
            epochs=setting.epochs,
            file=f"{self.folder}/{name}-rank-{start}-{leg}-{rank}",
            tmp=f"{self.folder}/tmp-{start}-{leg}-{rank}",
            seed=seed,
            batch=_BATCH,
            workers=setting.workers,
            step_seconds=self._seconds / steps * pace * (fast if is_apart and rank == 0 else 1),
            mixture=mixture,
        )

    def _url(self, rank: int, pod: int) -> str:
        return f"http://127.0.0.1:{self._rank_links[rank][pod].port}"

    def _let_it_run(self) -> None:
        self._until_all_ranks_receive()
        self._began = time.monotonic()
        for fault in self.schedule:
            self._do_at(fault.at_seconds, str(fault), lambda fault=fault: self.begin(fault))  # type: ignore[misc]
        deadline, received = 0.0, -1
        while True:
            now = time.monotonic() - self._began
            while self._todo and self._todo[0][0] <= now:
                _, _, what, do = heapq.heappop(self._todo)
                self._outcome.done.append((now, what))
                try:
                    do()
                except PodUnreachable as error:  # it does not start, or does not end
                    self._verdict.problems.append(f"{what}: {error}")
                    return
            if self.job_is_lost:
                failures = [process.failure for process in self.ranks]
                if all(failures) and not self.down:
                    self._job_was_lost([each for each in failures if each])
                    deadline, received = 0.0, -1
                    if self._verdict.problems:
                        return
            elif self._some_rank_failed():
                return
            if self.dataset_replaced and not self.ranks_down:
                failures = [process.failure for process in self.ranks]
                # One that had received nothing when it was replaced may read what is there now.
                if any(failures) and all(failures[i] or self._began_since(rank) for i, rank in enumerate(self.ranks)):
                    self._verdict.dataset_was_replaced([each for each in failures if each], self.dataset.url)
                    return
            if not self._todo:
                others_done = all(job.is_done for job in self.beside)
                if all(process.done for process in self.ranks) and others_done and not self.job_is_lost:
                    self._reads_the_replacement()  # a job that had not begun when it was put there
                    return
                more = sum(legs.bytes_written() for legs in self._all_legs)
                if more != received and not (self.dataset_replaced and received >= 0):
                    deadline, received = now + _GRACE_SECONDS, more
                if now > deadline:
                    stuck: list[int | str] = [rank for rank, process in enumerate(self.ranks) if not process.done]
                    if self.job_is_lost:
                        stuck = [rank for rank, process in enumerate(self.ranks) if not process.failure]
                    stuck += [job.name for job in self.beside if not job.is_done]
                    self._verdict.problems.append(f"ranks {stuck} wait, and heard nothing for {_GRACE_SECONDS:.0f} s")
                    return
            time.sleep(0.01)

    def _some_rank_failed(self) -> bool:
        for rank, process in enumerate(self.ranks):
            if rank in self.ranks_down or self.dataset_replaced or (failure := process.failure) is None:
                continue
            self._verdict.rank_ended(failure, registered_apart=self._registered_apart)
            return True
        for failure in filter(None, (job.failure for job in self.beside)):
            self._verdict.rank_ended(failure, registered_apart=False)
            return True
        return False

    def _job_was_lost(self, failures: list[str]) -> None:
        truth = GroundTruth(self._legs.files, self.dataset.checksums)
        self._verdict.job_was_lost(failures, truth, self.setting.epochs)
        self._outcome.faults["jobs lost"] += 1
        self.job_is_lost = False
        self._begin_anew()

    def _until_all_ranks_receive(self) -> None:
        """Faults are to meet a job that runs."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and not all(legs.have_begun for legs in self._all_legs):
            time.sleep(0.02)

    @property
    def _all_legs(self) -> list[Legs]:
        """Of jobs that go on to the end."""
        return [self._legs, *(job.legs for job in self.beside if not job.is_over)]

    def _do_at(self, at_seconds: float, what: str, do: Callable[[], None]) -> None:
        heapq.heappush(self._todo, (at_seconds, next(self._numbers), what, do))

    def begin(self, fault: Fault) -> None:
        if ALL[fault.kind].do(self, fault):
            self._outcome.faults[fault.kind] += 1
        else:
            self._outcome.done.append((time.monotonic() - self._began, "not done: its target is down"))

    def _judge(self) -> None:
        outcome = self._outcome
        if self.setting.is_planned:
            self._judge_planned(self.name, self._legs, self.setting.seed, has_lost=self._has_lost)
            for job in self.beside:
                self._judge_beside(job)
        else:
            truth = GroundTruth(self._legs.files, self.dataset.checksums)
            outcome.deliveries, outcome.asked_again = truth.deliveries, truth.asked_again
            self._verdict.judge_live(truth, self.setting.epochs, lambda epoch: self._receipts.of(self.name, epoch))
        outcome.faults["answers reset"] += sum(link.answers_reset for link in self._links())
        for what, count in self.store.counts.items():
            outcome.faults[f"store requests {what}"] += count
        if self.setting.beside:
            outcome.shared_bytes = self._shared_bytes()
        for path in self.folder.glob("twin-*"):
            if path.suffix == "" and (received := path.read_text()):
                self._verdict.problems.append(f"{path.name} received, while the rank lived: {received[:200]}")

    def _shared_bytes(self) -> int:
        found = 0
        for url in self.cluster.pod_urls:
            with contextlib.suppress(httpx.TransportError):
                text = httpx.get(f"{url}/metrics", timeout=30).text
                found += sum(int(float(count)) for count in _SHARED_BYTES.findall(text))
        return found

    def _judge_planned(self, name: str, legs: Legs, seed: int, *, has_lost: bool) -> None:
        """One job, by its own ground truth and receipts."""
        setting, receipts = self.setting, self._receipts
        if (truth := self._truth(name, legs, seed)) is None:
            return
        if isinstance(truth.order, MixedOrder):
            passes = truth.order.passes(truth.planned_in, setting.epochs)
            self._verdict.judge_mixture(
                truth, setting.epochs, passes, partial(receipts.of_pass, name, may_lack=has_lost), may_lack=has_lost
            )
        else:
            is_listed = isinstance(truth.order, ListedOrder)
            last = partial(receipts.last, name, num_epochs=setting.epochs, may_lack=has_lost)
            self._verdict.judge_planned(truth, setting.epochs, last, may_lack=has_lost, is_listed=is_listed)

    def _judge_beside(self, job: JobBeside) -> None:
        if not job.is_over:
            self._judge_planned(job.name, job.legs, job.seed, has_lost=job.has_lost)
        elif plan_ids_of(self._files_of(job.name)) and (truth := self._truth(job.name, job.legs, job.seed)) is not None:
            self._verdict.problems += truth.damaged  # what came until it was ended is of its plan

    def _truth(self, name: str, legs: Legs, seed: int) -> PlannedTruth | None:
        plan, by_plan = legs.plan, plan_ids_of(self._files_of(name))
        if plan is None or len(by_plan) != 1:
            self._verdict.problems.append(f"ranks of {name} went by these plans: {by_plan}")
            return None
        order = self._order_by(plan, seed, len(legs.ranks))
        batch = 1 if isinstance(order, ListedOrder) else _BATCH
        truth = PlannedTruth(legs.leg(), self.dataset.checksums, order, batch, drop_last=self.setting.drop_last)
        self._outcome.deliveries += truth.deliveries
        self._outcome.asked_again += truth.asked_again
        return truth

    def _order_by(self, plan: dict[str, Any], seed: int, num_ranks: int) -> EpochOrder:
        if isinstance(self.dataset, ChaosMixture):
            return MixedOrder(self.dataset, plan, seed)  # type: ignore[return-value]
        if self.setting.order == "explicit":
            return ListedOrder(self.dataset.num_positions // num_ranks * num_ranks, seed)
        return PlannedOrder(self.dataset, plan)

    @property
    def _files(self) -> list[Path]:
        """Of all ranks of the first job."""
        return self._files_of(self.name)

    def _files_of(self, name: str) -> list[Path]:
        return sorted(path for path in self.folder.glob(f"{name}-rank-*") if not path.suffix)

    def _last_logs(self) -> list[str]:
        found = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            found += [f"{path.name}:", *(f"  {line}" for line in lines)]
        return found


def _new_name() -> str:
    return f"chaos-{uuid.uuid4().hex[:8]}"
