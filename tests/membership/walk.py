"""Which files does a batch enter on its way through three pods? ``python -m tests.membership.walk``.

Counts functions of this repository that are called while one rank asks pods in this process for a batch of 64: traced
by ``sys.setprofile``, in the order in which a file is entered first. What runs once (opening, registering) has run
before; files that not each of three batches enters are left out, as are those of what happens to end at that time.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlencode

import numpy as np
from tests.membership.planned_in_process import PlannedRank, Run, new_name
from tests.membership.pods_in_process import PodsInProcess, scope_of

import refill
import refill_service
from refill.protocol.wire_format import BatchRequest
from refill_service.serving.batch_door import BatchAtOnce

__all__ = ["Walk", "walk_of_a_batch", "walk_of_a_batch_at_once"]

_BATCH, _BATCHES = 64, 3
_CLIENT, _PODS = (str(Path(str(package.__file__)).parent) + "/" for package in (refill, refill_service))


class Walk:
    """Calls by file, in the order in which each is entered first."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def trace(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith((_CLIENT, _PODS)) and not frame.f_code.co_name.startswith("<"):
            self.calls[path.replace(_CLIENT, "client/").replace(_PODS, "pods/")] += 1

    def only_also_in(self, others: list[Walk]) -> Walk:
        """Without the files that not all of these enter."""
        self.calls = Counter({path: self.calls[path] for path in self.calls if all(path in it.calls for it in others)})
        return self

    def files(self, of: str) -> list[str]:
        """:param of: ``client`` or ``pods``."""
        return [path for path in self.calls if path.startswith(f"{of}/")]


def walk_of_a_batch(dataset: str, folder: Path, *, is_direct: bool = True) -> tuple[Walk, Walk]:
    """What the rank enters, and what the pods enter.

    :param is_direct: the rank asks all pods itself; else its home asks the others.
    """
    of_rank, of_pods = ([Walk() for _ in range(_BATCHES)] for _ in range(2))

    async def traced(trace: Any) -> None:
        sys.setprofile(trace)
        await asyncio.sleep(0)

    with PodsInProcess(3) as pods:
        run = Run(pods, dataset, new_name(), 1)
        rank = run.ranks[0]
        assert isinstance(rank, PlannedRank)
        if not is_direct:
            rank.asks_its_home()
        for start in range(0, 4 * _BATCH, _BATCH):
            rank.batch(0, np.arange(start, start + _BATCH))
        for number in range(_BATCHES):
            pods.do(traced(of_pods[number].trace))
            sys.setprofile(of_rank[number].trace)
            try:
                rank.batch(0, np.arange(_BATCH) + (4 + number) * _BATCH)
            finally:
                sys.setprofile(None)
                pods.do(traced(None))
    # The rank's thread calls the pods of this process in their own: what it enters there is the tests'.
    return of_rank[0].only_also_in(of_rank), of_pods[0].only_also_in(of_pods)


def walk_of_a_batch_at_once(dataset: str) -> Walk:
    """What a pod enters for a batch whose samples are all in its memory: the home's side of the way."""
    walks = [Walk() for _ in range(_BATCHES)]

    async def answered(at_once: BatchAtOnce, path: str, wanted: BatchRequest, walk: Walk) -> None:
        """As soon as all of it is there."""
        body = wanted.encode()
        while True:
            sys.setprofile(walk.trace)
            answer = at_once.answer(scope_of("POST", path, body), body, None)
            sys.setprofile(None)
            if answer is not None:
                answer.sent()
                assert answer.status == 200
                return
            walk.calls.clear()
            await asyncio.sleep(0)

    with PodsInProcess(1, memory_bytes="64MiB") as pods:
        run = Run(pods, dataset, new_name(), 1, memory_bytes=16 << 20)
        run.ranks[0].batch(0, np.arange(_BATCH))
        job = pods.node(0).planned.jobs[run.name]
        path = f"/v1/jobs/{run.name}/planned/batch?{urlencode({'plan': job.plan_id, 'batch': _BATCH, 'part': True})}"
        for number, walk in enumerate(walks):
            wanted = BatchRequest(0, 0, np.arange(_BATCH) + (1 + number) * _BATCH)
            pods.do(answered(pods.at_once[0], path, wanted, walk))
    return walks[0].only_also_in(walks)


def main() -> None:
    from tests.pod_fixtures import write_files

    from refill_service import cli

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "files").mkdir()
        write_files(folder / "files", 1000)
        dataset = f"file://{folder / 'dataset'}"
        cli.main(["pack", str(folder / "files"), dataset, "--blob-size", "256KB"])
        for is_direct in (True, False):
            of_rank, of_pods = walk_of_a_batch(dataset, folder, is_direct=is_direct)
            print(f"\n{'direct' if is_direct else 'by way of its home'}:")
            for walk, of in ((of_rank, "client"), (of_pods, "pods")):
                files = walk.files(of)
                print(f"\n{of}: {len(files)} files, {sum(walk.calls[path] for path in files):,} calls")
                print(*(f"{walk.calls[path]:6,}  {path}" for path in files), sep="\n")
        walk = walk_of_a_batch_at_once(dataset)
        print(f"\nin memory of the pod: {len(walk.files('pods'))} files, {walk.calls.total():,} calls")
        print(*(f"{walk.calls[path]:6,}  {path}" for path in walk.files("pods")), sep="\n")


if __name__ == "__main__":
    main()
