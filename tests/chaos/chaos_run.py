"""Does a job stay exact while everything around it fails? One run: pods, ranks, relays, a schedule, a verdict.

The verdict comes from what the ranks wrote down, and the pods' own receipts must agree with it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tests.chaos.chaos_dataset import ChaosDataset
from tests.chaos.ground_truth import GroundTruth
from tests.chaos.rank import RankPlan, read_answers
from tests.chaos.rank_process import RankProcess
from tests.chaos.schedule import Fault, Setting, schedule_of
from tests.chaos.store_relay import StoreFaults, store_relay
from tests.chaos.tcp_relay import Link, Relay

from refill_service.demo.local_cluster import LocalCluster

__all__ = ["ChaosRun", "Outcome", "repeated_by"]

EPOCHS = 3
_BATCH = 16
_GRACE_SECONDS = 60.0
"""After the last fault is healed: pods that nobody answers are given up after less."""
_SHARE = 0.5
"""Of requests to the store that a fault hits."""
_STALLED_SHARE = 0.1
_ANSWERS_RESET = 2
_DELAY_SECONDS = 0.05
_LOG_LINES = 15
_STORE_FAULTS = {
    "store refuses": "refused",
    "store answers short": "short",
    "store answers wrong": "wrong",
    "store is slow": "slow",
    "store stalls": "stalled",
}


@dataclass
class Outcome:
    """What became of a run."""

    setting: Setting
    problems: list[str]
    done: list[tuple[float, str]]
    """What was done to it, and when: seconds from its beginning."""
    faults: Counter[str] = field(default_factory=Counter)
    """How often each kind came about."""
    deliveries: int = 0
    asked_again: int = 0
    receipts: int = 0
    logs: list[str] = field(default_factory=list)
    seconds: float = 0.0

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
        f"python -m tests.chaos --seed {setting.seed} --policy {setting.policy} --volumes {setting.volumes} "
        f"--fault-seconds {fault_seconds:g}" + (" --scale" if setting.scales else "")
    )


class ChaosRun:
    """One run. Everything it starts ends with it, however it ends."""

    def __init__(self, setting: Setting, dataset: ChaosDataset, seconds: float) -> None:
        self.setting = setting
        self.schedule = schedule_of(setting, seconds)
        self._dataset = dataset
        self._seconds = seconds
        self._todo: list[tuple[float, int, str, Callable[[], None]]] = []
        """What is to be done next: when, a number of its own, what, how."""
        self._numbers = itertools.count()
        self._outcome = Outcome(setting, [], [])
        self._down: set[int] = set()
        self._ranks: list[RankProcess] = []
        self._rank_down: set[int] = set()

    def run(self) -> Outcome:
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            self._folder = Path(tempfile.mkdtemp(prefix="chaos-"))
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._store: StoreFaults = stack.enter_context(store_relay(self._dataset.endpoint, self.setting.seed))
            self._relay = stack.enter_context(Relay())
            self._pod_links: dict[tuple[int, int], Link] = {}
            self._cluster = stack.enter_context(self._pods())
            self._rank_links = [
                [self._relay.link(int(url.rpartition(":")[2])) for url in self._cluster.pod_urls]
                for _ in range(self.setting.ranks)
            ]
            self._name = f"chaos-{uuid.uuid4().hex[:8]}"
            for rank in range(self.setting.ranks):
                self._ranks.append(RankProcess(self._plan(rank)))
                stack.callback(self._ranks[rank].stop)
            self._let_it_run()
            if not self._outcome.problems:
                self._judge()
            if self._outcome.problems:
                self._outcome.logs = self._last_logs()
        self._outcome.seconds = time.monotonic() - started
        return self._outcome

    def _pods(self) -> LocalCluster:
        setting = self.setting
        settings: dict[str, str | int | float] = {
            "memory_bytes": "4MiB",
            "pinned_fraction": setting.pinned_fraction,
            "wait_seconds": 2,
            "peer_timeout_seconds": 10,
        }
        if setting.volumes != "none":
            settings["journal_dir"] = f"{self._folder}/journal-{{ordinal}}"
        if setting.unix_socket:
            settings["unix_socket"] = f"{self._folder}/pod-{{ordinal}}.sock"
        environment = dict(self._dataset.environment) | {
            "AWS_ENDPOINT_URL": self._store.url,
            "REFILL_STORE_FIRST_BACKOFF_SECONDS": "0.02",
            "REFILL_STORE_MAX_BACKOFF_SECONDS": "0.2",
            "REFILL_STORE_REQUEST_TIMEOUT_SECONDS": "2",
        }
        return LocalCluster(setting.pods, self._folder, settings, environment, self._peer_url)

    def _peer_url(self, from_pod: int, to_pod: int, url: str) -> str:
        if (from_pod, to_pod) not in self._pod_links:
            self._pod_links[from_pod, to_pod] = self._relay.link(int(url.rpartition(":")[2]))
        return f"http://127.0.0.1:{self._pod_links[from_pod, to_pod].port}"

    def _plan(self, rank: int) -> RankPlan:
        setting = self.setting
        spec = {
            "name": self._name,
            "dataset": self._dataset.url,
            "world_size": setting.ranks,
            "seed": setting.seed,
            "policy": setting.policy,
            "chunk_size": setting.chunk_size,
            "order": setting.order,
            "memory_bytes": 600_000,
        }
        steps = EPOCHS * len(self._dataset.checksums) / setting.ranks / _BATCH / setting.workers
        return RankPlan(
            service=self._url(rank, setting.home_of(rank)),
            home=self._home(rank, setting.home_of(rank)),
            spec=spec,
            rank=rank,
            epochs=EPOCHS,
            file=f"{self._folder}/rank-{rank}",
            seed=setting.seed,
            batch=_BATCH,
            workers=setting.workers,
            step_seconds=self._seconds / steps,
        )

    def _url(self, rank: int, pod: int) -> str:
        return f"http://127.0.0.1:{self._rank_links[rank][pod].port}"

    def _home(self, rank: int, pod: int) -> str:
        if self.setting.unix_socket and rank == 0:
            return f"unix:{self._folder}/pod-{pod}.sock"
        return self._url(rank, pod)

    def _let_it_run(self) -> None:
        self._until_all_ranks_receive()
        self._began = time.monotonic()
        for fault in self.schedule:
            self._do_at(fault.at_seconds, str(fault), lambda fault=fault: self._begin(fault))  # type: ignore[misc]
        deadline = None
        while True:
            now = time.monotonic() - self._began
            while self._todo and self._todo[0][0] <= now:
                _, _, what, do = heapq.heappop(self._todo)
                self._outcome.done.append((now, what))
                do()
            for rank, process in enumerate(self._ranks):
                if rank not in self._rank_down and (failure := process.failure) is not None:
                    self._outcome.problems.append(f"rank {rank} failed: {failure}")
                    return
            if not self._todo:
                deadline = deadline or now + _GRACE_SECONDS
                if all(process.done for process in self._ranks):
                    return
                if now > deadline:
                    stuck = [rank for rank, process in enumerate(self._ranks) if not process.done]
                    self._outcome.problems.append(f"ranks {stuck} were not done {_GRACE_SECONDS:.0f} s after the end")
                    return
            time.sleep(0.01)

    def _until_all_ranks_receive(self) -> None:
        """Faults are to meet a job that runs."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and not all(
            process.failure or any(read_answers(Path(process.plan.file))) for process in self._ranks
        ):
            time.sleep(0.02)

    def _do_at(self, at_seconds: float, what: str, do: Callable[[], None]) -> None:
        heapq.heappush(self._todo, (at_seconds, next(self._numbers), what, do))

    def _then(self, fault: Fault, what: str, do: Callable[[], None]) -> None:
        """When the fault ends."""
        self._do_at(time.monotonic() - self._began + fault.seconds, what, do)

    def _begin(self, fault: Fault) -> None:
        if self._carry_out(fault):
            self._outcome.faults[fault.kind] += 1
        else:
            self._outcome.done.append((time.monotonic() - self._began, "not done: its target is down"))

    def _carry_out(self, fault: Fault) -> bool:
        """Do what a fault says; False when its target is down already."""
        kind, _, what = fault.kind.partition(" ")
        if what == "pod":
            return self._to_pod(fault, kind, fault.target[0])
        if kind == "scale":
            return self._scale(fault, fault.target[0])
        if what == "pods":
            if (link := self._pod_links.get((fault.target[0], fault.target[1]))) is None:
                return False
            self._to_links(fault, kind, [link])
        elif what == "rank":
            return self._to_rank(fault, kind, fault.target[0])
        else:
            self._to_store(fault)
        return True

    def _to_pod(self, fault: Fault, kind: str, pod: int) -> bool:
        cluster = self._cluster
        if pod in self._down or pod >= len(cluster.processes):
            return False
        self._down.add(pod)
        if kind == "pause":
            cluster.pause(pod)
            self._then(fault, f"pod {pod} goes on", lambda: self._up(pod, lambda: cluster.resume(pod)))
            return True
        if kind == "end":
            cluster.processes[pod].terminate()
            cluster.processes[pod].wait(30)
        else:
            cluster.kill(pod)
        if kind == "lose":
            shutil.rmtree(self._folder / f"journal-{pod}", ignore_errors=True)
        self._then(fault, f"pod {pod} starts", lambda: self._up(pod, lambda: cluster.restart(pod, wait=False)))
        return True

    def _scale(self, fault: Fault, num_pods: int) -> bool:
        if self._down or num_pods == self._cluster.num_pods:
            return False
        self._down |= set(range(self.setting.pods))
        self._cluster.end()

        def start() -> None:
            self._cluster.start(num_pods)
            self._down.clear()

        self._then(fault, f"{num_pods} pods start", start)
        return True

    def _up(self, pod: int, how: Callable[[], None]) -> None:
        how()
        self._down.discard(pod)

    def _to_links(self, fault: Fault, kind: str, links: list[Link]) -> None:
        def heal() -> None:
            for link in links:
                link.cut, link.delay_seconds = False, 0.0
                if kind == "cut" and int(fault.seconds * 100) % 2:  # some find their connections alive, some dead
                    self._relay.reset(link)

        for link in links:
            if kind == "reset":
                link.resets += _ANSWERS_RESET
            elif kind == "cut":
                link.cut = True
            else:
                link.delay_seconds = _DELAY_SECONDS
        if kind != "reset":
            self._then(fault, f"{fault.kind} {fault.target} ends", heal)

    def _to_rank(self, fault: Fault, kind: str, rank: int) -> bool:
        process = self._ranks[rank]
        if rank in self._rank_down:
            return False
        if kind == "kill":
            process.kill()
            process.restart(self._home(rank, fault.target[1]))
        elif kind == "pause":
            self._rank_down.add(rank)
            process.pause()

            def resume() -> None:
                process.resume()
                self._rank_down.discard(rank)

            self._then(fault, f"rank {rank} goes on", resume)
        else:
            self._to_links(fault, kind, self._rank_links[rank])
        return True

    def _to_store(self, fault: Fault) -> None:
        store, what = self._store, _STORE_FAULTS[fault.kind]
        setattr(store, what, _STALLED_SHARE if what == "stalled" else _SHARE)
        self._then(fault, f"{fault.kind}: ends", lambda: setattr(store, what, 0.0))

    def _judge(self) -> None:
        outcome, setting = self._outcome, self.setting
        files = [Path(process.plan.file) for process in self._ranks]
        truth = GroundTruth(files, self._dataset.checksums)
        outcome.problems += truth.check(EPOCHS, setting.ranks)
        outcome.deliveries, outcome.asked_again = truth.deliveries, truth.asked_again
        links = [*self._pod_links.values(), *itertools.chain.from_iterable(self._rank_links)]
        outcome.faults["answers reset"] += sum(link.answers_reset for link in links)
        for what, count in self._store.counts.items():
            outcome.faults[f"store requests {what}"] += count
        if not outcome.problems:
            self._check_receipts()

    def _check_receipts(self) -> None:
        """An epoch that is long over has no receipt where a volume was lost with it, or the job has moved; the last one
        always has."""
        for epoch in range(EPOCHS):
            url = f"{self._cluster.pod_urls[0]}/v1/jobs/{self._name}/epochs/{epoch}/receipt"
            answer = self._receipt(url)
            lost = self.setting.volumes != "kept" or self.setting.scales
            if answer.status_code == 400 and epoch + 1 < EPOCHS and lost:
                continue
            if answer.status_code != 200:
                self._outcome.problems.append(f"epoch {epoch} has no receipt: {answer.text[:300]}")
                continue
            receipt: dict[str, Any] = answer.json()
            self._outcome.receipts += 1
            if any(receipt[name] for name in ("duplicates", "unknown", "missing")):
                self._outcome.problems.append(f"the receipt of epoch {epoch} says: {receipt}")

    def _receipt(self, url: str) -> httpx.Response:
        """Pods that were just restarted are given time to recover, as anybody gives them who asks."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(url, timeout=30)
                if answer.status_code != 503 or time.monotonic() > deadline:
                    return answer
            if time.monotonic() > deadline:
                return httpx.Response(503, text="pod 0 does not answer")
            time.sleep(0.2)

    def _last_logs(self) -> list[str]:
        found = []
        for path in sorted(self._folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            found += [f"{path.name}:", *(f"  {line}" for line in lines)]
        return found
