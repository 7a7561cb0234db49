"""What does a rank of a planned job, or of a mixture, do in a run of chaos? What other ranks do, and it saves states as
a loop does.

    python -m tests.chaos.planned_rank '{"service": ..., "home": ..., ...}'

After every few batches that its loop has consumed it saves ``FILE.state``. Killed and started again it goes on from
there: what it had received since comes again, with the same samples. Where its order is explicit, it lists the samples
of each epoch, and names them in its requests.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tests.chaos.epoch_orders import plan_id_of
from tests.chaos.rank import Answer, Begun, RankPlan, end_half_a_line, end_with_input, trace_of

import refill
from refill.errors import RefillError
from refill.pods.planned_connection import PlannedConnection
from refill.pods.planned_place import DealtConnection, goes_on_from, state_at
from refill.pods.resume_state import ResumeState
from refill.protocol.job_spec import JobSpec

__all__ = ["connection_of"]

_SAVES_EVERY = 3
_AGAIN_SHARE = 0.03


def connection_of(plan: RankPlan) -> DealtConnection:
    """To the pods of a planned job, or of a mixture."""
    spec, home = JobSpec.from_dict(plan.spec), plan.home or None
    if plan.mixture is None:
        return PlannedConnection(plan.service, spec, plan.rank, home, plan.timeout_seconds)
    mixture = refill.Mixture(
        plan.service,
        job=spec.name,
        rank=plan.rank,
        home=home,
        timeout_seconds=plan.timeout_seconds,
        read_seed=spec.read_seed,
        **{name: plan.spec[name] for name in ("world_size", "seed", "drop_last", "chunk_size", "memory_bytes")},
        **{name: _by_epochs(given) if name == "weights" else given for name, given in plan.mixture.items()},
    )
    return mixture.connection


def _by_epochs(weights: dict[str, Any]) -> dict[Any, Any]:
    """JSON has made text of the epochs."""
    return {int(name) if name.isdigit() else name: each for name, each in weights.items()}


class _Rank:
    def __init__(self, plan: RankPlan) -> None:
        self._plan = plan
        self._pods = connection_of(plan)
        self._pods.asks_in_batches(plan.batch)
        self._chooser = random.Random(f"{plan.seed} {plan.rank} {os.getpid()}")
        self._writing = threading.Lock()
        end_half_a_line(Path(plan.file))
        self._file = os.open(plan.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def run(self) -> None:
        epoch, position = self._begin()
        batch, last = self._plan.batch, self._plan.epochs - 1
        with ThreadPoolExecutor(self._plan.workers) as workers:
            for each in range(epoch, self._plan.epochs):
                length, first = self._length(each), position if each == epoch else 0
                if self._pods.spec.is_listed:
                    assert isinstance(self._pods, PlannedConnection)
                    self._pods.post_list(each, trace_of(self._plan, each, length), first)
                starts = range(first, length, batch)
                steps = workers.map(lambda start, each=each, length=length: self._step(each, start, length), starts)
                for number, end in enumerate(steps, 1):
                    if number % _SAVES_EVERY == 0 or end == length:
                        self._save(state_at(self._pods, each, end, length))
            length = self._length(last)
            again = range(position if epoch == last else 0, length, batch)
            list(workers.map(lambda start: self._ask(last, start, length), again))
        _touch(self._plan.file, "done")
        while True:
            time.sleep(0.1)
            if again:
                self._ask(last, self._chooser.choice(again), length)

    def _begin(self) -> tuple[int, int]:
        """Epoch and position that come first, of what was saved last, or the checkpoint that the ranks began from."""
        saved = Path(f"{self._plan.file}.state")
        state = json.loads(saved.read_text()) if saved.exists() else self._plan.state
        if state is None:
            self._pods.info()
            first = state_at(self._pods, 0, 0, self._length(0))
        else:
            first = goes_on_from(ResumeState.from_dict(state), self._pods)
        epoch, position = first.next_place
        begun = Path(f"{self._plan.file}.begun")
        if not begun.exists():
            dealing = self._pods.dealing(epoch)
            line = Begun(self._pods.plan_id, epoch, position, self._length(epoch), dealing.start, self._pods.plan)
            new = begun.with_suffix(".new")
            new.write_text(json.dumps(line))
            new.replace(begun)
        return epoch, position

    def _length(self, epoch: int) -> int:
        if self._pods.spec.is_listed:
            return int(self._pods.info()["num_samples"]) // self._pods.spec.world_size
        return self._pods.dealing(epoch).per_rank

    def _step(self, epoch: int, start: int, length: int) -> int:
        """Returns the position behind it."""
        batch = self._plan.batch
        if start >= batch and self._chooser.random() < _AGAIN_SHARE:
            self._ask(epoch, start - self._chooser.randrange(1, start // batch + 1) * batch, length)
        self._ask(epoch, start, length)
        time.sleep(self._plan.step_seconds)
        return min(start + batch, length)

    def _ask(self, epoch: int, start: int, length: int) -> None:
        positions = np.arange(start, min(start + self._plan.batch, length))
        wanted = trace_of(self._plan, epoch, length)[positions] if self._pods.spec.is_listed else None
        answer = self._pods.batch(epoch, positions, wanted)
        checksums = [zlib.crc32(payload) for payload in answer.payloads]
        line = Answer(epoch, positions.tolist(), answer.sample_ids.tolist(), checksums, plan_id_of(self._pods.plan))
        with self._writing:
            os.write(self._file, json.dumps(line).encode() + b"\n")

    def _save(self, state: ResumeState) -> None:
        new = Path(f"{self._plan.file}.state.new")
        new.write_text(json.dumps(state.to_dict()))
        new.replace(f"{self._plan.file}.state")


def _touch(file: str, what: str) -> None:
    Path(f"{file}.{what}").touch()


def main() -> None:
    plan = RankPlan(**json.loads(sys.argv[1]))
    end_with_input()
    try:
        _Rank(plan).run()
    except RefillError as error:
        raise SystemExit(f"rank {plan.rank}: {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
