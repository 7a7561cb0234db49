"""Does a loop over a mixture stay exact while pods are killed, their number changes, and ranks go back to a state?

    python -m tests.chaos.mixture_run --first-seed 0 --seeds 5

What goes wrong follows from the seed. Ranks are loops of this process, as a training script makes them, and take their
batches in turn; all that they know is dropped when they "crash", and others go on from the state saved last, as many as
the seed says. The verdict comes from what they had: each position of each epoch once, which is each sample of a pass at
most once, and nothing again but what fills up an epoch's last step.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch.utils.data
from tests.pod_fixtures import write_files

import refill
from refill.protocol.dealing import Dealing
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

__all__ = ["MixtureOutcome", "mixture_datasets", "run_mixture"]

_SIZES = {"web": 260, "code": 90, "books": 31}
_BATCH = 8
_EPOCHS = 2
_SAVES_EVERY = 3
_FAULT_SHARE = 0.12

Sample = tuple[str, int]


@dataclass
class MixtureOutcome:
    done: list[str] = field(default_factory=list)
    """What went wrong, in order."""
    steps: int = 0
    problems: list[str] = field(default_factory=list)


def mixture_datasets(folder: Path) -> dict[str, str]:
    found = {}
    for name, size in _SIZES.items():
        source, store = folder / f"{name}-files", folder / name
        source.mkdir()
        store.mkdir()
        write_files(source, size, most=800, seed=size)
        asyncio.run(pack(str(source), store.as_uri(), blob_bytes=20_000))
        found[name] = store.as_uri()
    return found


def run_mixture(seed: int, datasets: dict[str, str], folder: Path) -> MixtureOutcome:
    """:param folder: for the pods' logs."""
    chooser = random.Random(f"mixture {seed}")
    how: dict[str, Any] = chooser.choice(
        (
            {"weights": {"web": 0.6, "code": 0.4}, "epoch_size": 333},
            {"repeat": {"code": 2.5, "books": 0.5}},
            {"weights": {0: {"web": 0.5, "books": 0.5}, 1: {"web": 0.2, "code": 0.8}}, "epoch_size": 200},
        )
    )
    how = {"seed": seed, "memory_bytes": 700_000, "chunk_size": 8, "timeout_seconds": 120} | how
    settings = {"memory_bytes": "4MiB", "pinned_fraction": 0, "wait_seconds": 2}
    with LocalCluster(chooser.choice((2, 3)), folder, settings) as cluster:
        return _Run(chooser, cluster, datasets, how).run()


class _Run:
    def __init__(
        self, chooser: random.Random, cluster: LocalCluster, datasets: dict[str, str], how: dict[str, Any]
    ) -> None:
        self._chooser, self._cluster, self._datasets, self._how = chooser, cluster, datasets, how
        self._job = f"mixture-{uuid.uuid4().hex[:8]}"
        self._outcome = MixtureOutcome()
        self._had: dict[int, list[Sample]] = {epoch: [] for epoch in range(_EPOCHS)}
        self._down: int | None = None
        """A pod that is away."""

    def run(self) -> MixtureOutcome:
        epoch, state = 0, None
        while epoch < _EPOCHS:
            epoch, state = self._leg(epoch, state)
        return self._outcome

    def _leg(self, epoch: int, state: Any) -> tuple[int, Any]:
        """From one crash of all ranks to the next: the epoch and the state that others go on with."""
        ranks = self._chooser.choice((1, 2, 3))
        alive = [url for pod, url in enumerate(self._cluster.pod_urls) if pod != self._down]
        loops = [
            _Loop(alive[rank % len(alive)], self._datasets, self._job, self._how, rank, ranks, state)
            for rank in range(ranks)
        ]
        self._outcome.done.append(f"epoch {epoch}: {ranks} ranks begin after {len(self._had[epoch])} samples")
        saved = state, len(self._had[epoch])
        for each in range(epoch, _EPOCHS):
            start = len(self._had[each])
            batches = [loop.batches(each) for loop in loops]
            step = 0
            while True:
                taken = [next(of_rank, None) for of_rank in batches]
                if None in taken:
                    if taken != [None] * ranks:
                        self._outcome.problems.append(f"epoch {each}: ranks end after different numbers of batches")
                    break
                self._had[each] += [sample for batch in taken if batch is not None for sample in batch]
                step, self._outcome.steps = step + 1, self._outcome.steps + 1
                if step % _SAVES_EVERY == 0:
                    saved = loops[0].state(), len(self._had[each])
                if self._chooser.random() < _FAULT_SHARE and self._goes_wrong():
                    del self._had[each][saved[1] :]
                    return each, saved[0]
            self._judge(each, start, ranks, loops[0])
            saved = loops[0].state(), 0
        return _EPOCHS, None

    def _goes_wrong(self) -> bool:
        """Whether all ranks crash."""
        kind = self._chooser.choice(("ranks", "kill", "kill", "scale"))
        if kind == "ranks":
            self._outcome.done.append("all ranks crash")
            return True
        if self._down is not None:
            self._outcome.done.append(f"pod {self._down} starts")
            self._cluster.restart(self._down, wait=False)
            self._down = None
        elif kind == "kill":
            self._down = self._chooser.randrange(self._cluster.num_pods)
            self._outcome.done.append(f"pod {self._down} is killed")
            self._cluster.kill(self._down)
        else:
            self._outcome.done.append(f"{5 - self._cluster.num_pods} pods in place of {self._cluster.num_pods}")
            self._cluster.scale(5 - self._cluster.num_pods)
        return False

    def _judge(self, epoch: int, start: int, ranks: int, loop: _Loop) -> None:
        """An epoch is over, whose last leg was dealt from ``start`` on."""
        expected, had = Counter(loop.order(epoch)), Counter(self._had[epoch])
        num_positions = expected.total()
        filled_up = Dealing(num_positions, ranks, _BATCH, start).per_rank * ranks - (num_positions - start)
        never, again = expected - had, had - expected
        if never or again.total() != filled_up:
            self._outcome.problems.append(
                f"epoch {epoch}: of {num_positions} positions {never.total()} never came {sorted(never)[:5]}, and "
                f"{again.total()} came again {sorted(again)[:5]}, where {filled_up} fill up the last step"
            )
        by_dataset = {name: sum(count for (of, _), count in expected.items() if of == name) for name in _SIZES}
        if (said := loop.mixture.counts(epoch)) != {name: by_dataset[name] for name in said}:
            self._outcome.problems.append(f"epoch {epoch}: its order has {by_dataset}, and counts say {said}")


class _Loop:
    """A rank's, as a training script makes it."""

    def __init__(
        self,
        url: str,
        datasets: dict[str, str],
        job: str,
        how: dict[str, Any],
        rank: int,
        ranks: int,
        state: Any,
    ) -> None:
        self.mixture = refill.Mixture(url, datasets, job=job, rank=rank, world_size=ranks, resume=state, **how)
        self._sampler = refill.EpochSampler(self.mixture)
        loader = torch.utils.data.DataLoader(
            self.mixture, batch_size=_BATCH, sampler=self._sampler, collate_fn=_names_of
        )
        self._loader = refill.timed(loader, self.mixture)
        if state is not None:
            self._loader.load_state_dict(state)

    def batches(self, epoch: int) -> Iterator[list[Sample]]:
        self._sampler.set_epoch(epoch)
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()

    def order(self, epoch: int) -> list[Sample]:
        """The sample at each position of an epoch's one order."""
        connection = self.mixture.connection
        every = [
            np.arange(size, dtype=np.int64) + first
            for size, first in zip(connection.sizes, connection.first_ids, strict=False)
        ]
        numbers = connection.in_order(epoch, every)
        members = np.searchsorted(connection.first_ids[1:], numbers, side="right")
        names = self.mixture.names
        return [
            (names[member], number - int(connection.first_ids[member]))
            for member, number in zip(members.tolist(), numbers.tolist(), strict=True)
        ]


def _names_of(batch: list[dict[str, Any]]) -> list[Sample]:
    return [(sample["__dataset__"], sample["__id__"]) for sample in batch]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=5, help="how many runs (default: %(default)s)")
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="chaos-mixture-") as name:
        datasets = mixture_datasets(Path(name))
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            folder = Path(name) / f"run-{seed}"
            folder.mkdir()
            outcome = run_mixture(seed, datasets, folder)
            failed += bool(outcome.problems)
            print(
                f"seed {seed}: {outcome.steps} steps, {'; '.join(outcome.done)}: {outcome.problems or 'exact'}",
                flush=True,
            )
    print(f"{given.seeds} runs, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
