"""How does a journal come back other than it was? Cut within a record or between two, without a file, or old."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.kinds.kind import Kind, a_pod
from tests.chaos.schedule import Fault, Setting

from refill.protocol.records import RecordReader

if TYPE_CHECKING:
    from tests.chaos.chaos_run import ChaosRun


def _cut(run: ChaosRun, fault: Fault) -> bool:
    """Target: a pod, whether at a record's boundary, and a number that says where."""
    pod, at_boundary, where = fault.target
    files = _files(run, pod)
    if not files or not run.take_down(pod):
        return False
    run.cluster.kill(pod)
    path = files[where % len(files)]
    data = path.read_bytes()
    ends = _boundaries(data) if at_boundary else list(range(len(data)))
    with path.open("r+b") as file:
        file.truncate(ends[where % len(ends)] if ends else 0)
    run.lost("memory")
    run.start_later(fault, pod)
    return True


def _boundaries(data: bytes) -> list[int]:
    """Where records end, but for the last one; 0, too."""
    found, reader = [0], RecordReader(data)
    for _ in reader:
        found.append(reader.intact_bytes)
    return found[:-1]


def _drop(run: ChaosRun, fault: Fault) -> bool:
    pod, where = fault.target[0], fault.target[2]
    files = _files(run, pod)
    if not files or not run.take_down(pod):
        return False
    run.cluster.kill(pod)
    files[where % len(files)].unlink()
    run.lost("memory")
    run.start_later(fault, pod)
    return True


def _put_back(run: ChaosRun, fault: Fault) -> bool:
    """Its folder of the job is copied, and a moment later the pod is killed and started with the copy."""
    pod = fault.target[0]
    folders = list(run.journal_of(pod).glob("job-*"))
    if not folders or pod in run.down or pod >= run.cluster.num_pods:
        return False
    copy = run.folder / f"copy-{pod}"
    shutil.rmtree(copy, ignore_errors=True)
    for folder in folders:
        shutil.copytree(folder, copy / folder.name, ignore_dangling_symlinks=True, copy_function=_copy_if_there)

    def put_back() -> None:
        if not run.take_down(pod):
            return
        run.cluster.kill(pod)
        for folder in copy.iterdir():
            now = run.journal_of(pod) / folder.name
            shutil.rmtree(now, ignore_errors=True)
            shutil.copytree(folder, now)
        run.lost("memory")
        run.start_later(fault, pod)

    run.then(fault, f"pod {pod} is killed, and gets the earlier copy", put_back)
    return True


def _copy_if_there(source: str, target: str) -> None:
    """The pod writes meanwhile."""
    if Path(source).exists():
        shutil.copyfile(source, target)


def _files(run: ChaosRun, pod: int) -> list[Path]:
    return sorted(run.journal_of(pod).glob("job-*/*.records")) if pod < run.cluster.num_pods else []


def _a_place(setting: Setting, chooser: random.Random) -> tuple[int, ...]:
    return (*a_pod(setting, chooser), chooser.randrange(2), chooser.randrange(1 << 20))


def _weight(setting: Setting) -> int:
    return 3 * (setting.volumes != "none" and not setting.is_planned)


KINDS = [
    Kind(
        "cut journal",
        "a pod is killed, and a file of its journal is shorter when it starts; 1: it ends where a record does",
        _weight,
        _cut,
        _a_place,
        theme="journals",
    ),
    Kind("drop journal", "so it is, and a file of its journal is gone", _weight, _drop, _a_place, theme="journals"),
    Kind(
        "put back journal",
        "so it is, and the journal of the job is an earlier copy",
        _weight,
        _put_back,
        a_pod,
        theme="journals",
    ),
]
