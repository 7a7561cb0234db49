"""What can go wrong with the one thing that pods and ranks of a planned job must agree on, its plan? All ranks or pods
are gone at once, pods come back with other memory, ranks register while pods do not reach each other, and the dataset
is another one.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.chaos.kinds.kind import Kind, of_planned
from tests.chaos.schedule import Fault, Setting

if TYPE_CHECKING:
    from tests.chaos.chaos_run import ChaosRun

_MEMORY_BYTES = ("1MiB", "2MiB", "3MiB", "4MiB", "8MiB")


def _kill_all(run: ChaosRun, fault: Fault) -> bool:
    """Target: whether pods are killed, too, and which memory they have then."""
    with_pods, memory = fault.target
    if run.ranks_down or (with_pods and run.down):
        return False
    homes = [process.plan.home for process in run.ranks]
    run.stop_ranks()
    if with_pods:
        _kill_pods(run, fault, memory)
    run.then(fault, "ranks start again", lambda: run.restart_ranks(homes))
    return True


def _other_memory(run: ChaosRun, fault: Fault) -> bool:
    if run.down:
        return False
    _kill_pods(run, fault, fault.target[0])
    return True


def _kill_pods(run: ChaosRun, fault: Fault, memory: int) -> None:
    for pod in range(run.cluster.num_pods):
        run.take_down(pod)
        run.cluster.kill(pod)

    def start() -> None:
        for pod in range(run.cluster.num_pods):
            run.cluster.restart(pod, wait=False, settings={"memory_bytes": _MEMORY_BYTES[memory]})
            run.has_started(pod)

    run.then(fault, f"all pods start with memory_bytes {_MEMORY_BYTES[memory]}", start)


def _register_apart(run: ChaosRun, fault: Fault) -> bool:
    """Target: which links between pods are cut, a bit each; which pod is restarted with other memory meanwhile, which
    memory, and whether it is before ranks register."""
    cut, pod, memory, is_before = fault.target
    if run.down or run.ranks_down or pod >= run.cluster.num_pods:
        return False
    run.stop_ranks()
    pairs = [(a, b) for a in range(run.cluster.num_pods) for b in range(run.cluster.num_pods) if a != b]
    links = [link for number, pair in enumerate(pairs) if cut >> number & 1 for link in run.links_of_pods(*pair)]
    for link in links:
        link.cut = True

    def restart() -> None:
        if not run.take_down(pod):
            return
        run.cluster.kill(pod)
        run.cluster.restart(pod, settings={"memory_bytes": _MEMORY_BYTES[memory]})
        run.has_started(pod)

    def heal() -> None:
        for link in links:
            link.cut = False
            if cut % 2:
                run.relay.reset(link)

    if is_before:
        restart()
    run.begin_another_job()
    if not is_before:
        run.then(Fault(fault.at_seconds, fault.kind, (), fault.seconds / 2), f"pod {pod} is killed", restart)
    run.then(fault, "pods reach each other again", heal)
    return True


def _begin_without(run: ChaosRun, fault: Fault) -> bool:
    """Target: the memory with which pod 0 starts again, which another job finds away."""
    if run.down or run.ranks_down:
        return False
    run.stop_ranks()
    run.take_down(0)
    run.cluster.kill(0)
    run.begin_another_job()

    def start() -> None:
        run.cluster.restart(0, wait=False, settings={"memory_bytes": _MEMORY_BYTES[fault.target[0]]})
        run.has_started(0)

    run.then(fault, "pod 0 starts", start)
    return True


def _register_late(run: ChaosRun, fault: Fault) -> bool:
    """Target: the memory with which pod 0 starts again, apart from pods that know the plan, and whether it reaches the
    others. Then a rank that knows no plan registers there."""
    memory, reaches = fault.target
    rank, others = 0, range(1, run.cluster.num_pods)  # ranks with another home bring no plan there
    if run.down or run.ranks_down:
        return False
    links = [link for pod in others for link in [*run.links_of_pods(pod, 0), *run.links_of_pods(0, pod)[reaches:]]]
    run.take_down(0)
    for link in links:
        link.cut = True
    run.ranks[rank].kill()
    run.ranks[rank].forget()
    run.cluster.kill(0)
    run.cluster.restart(0, settings={"memory_bytes": _MEMORY_BYTES[memory]})
    run.has_started(0)
    run.registers_apart()
    run.ranks[rank].restart(run.home_url(rank, 0), run.home_url(rank, 0) or run.cluster.pod_urls[0])

    def heal() -> None:
        for link in links:
            link.cut = False

    run.then(fault, "pods reach each other again", heal)
    return True


def _replace_dataset(run: ChaosRun, fault: Fault) -> bool:
    """Target: whether pods are away then."""
    if run.down or run.ranks_down:
        return False
    if fault.target[0]:
        for pod in range(run.cluster.num_pods):
            run.take_down(pod)
            run.cluster.kill(pod)
            run.start_later(fault, pod)
        run.replace_dataset()
    return True


def _with_pods(setting: Setting, chooser: random.Random) -> tuple[int, ...]:
    return chooser.choice((0, 1, 1)), chooser.randrange(len(_MEMORY_BYTES))


def _a_memory(setting: Setting, chooser: random.Random) -> tuple[int, ...]:
    return (chooser.randrange(len(_MEMORY_BYTES)),)


def _parts(setting: Setting, chooser: random.Random) -> tuple[int, ...]:
    cut = chooser.choice((-1, -1, chooser.randrange(1, 1 << 6))) & 63
    return cut, chooser.randrange(setting.pods), chooser.randrange(len(_MEMORY_BYTES)), chooser.randrange(2)


KINDS = [
    Kind(
        "kill all ranks",
        "all ranks are killed and go on from the states that they saved; 1: and all pods, which have other memory then",
        of_planned(5),
        _kill_all,
        _with_pods,
        theme="plans",
        most=2,
    ),
    Kind(
        "other memory",
        "all pods are killed at once, and have other memory when they start",
        of_planned(5),
        _other_memory,
        _a_memory,
        theme="plans",
        most=2,
    ),
    Kind(
        "begin without",
        "ranks of another job register while pod 0 is away, which has other memory when it comes back",
        of_planned(12, least_pods=3),
        _begin_without,
        _a_memory,
        theme="plans",
        lasts=(0.5, 8.0),
        most=1,
    ),
    Kind(
        "register apart",
        "ranks of another job register at the same time at pods that do not reach each other",
        of_planned(12, least_pods=2),
        _register_apart,
        _parts,
        theme="partitions",
        lasts=(0.5, 8.0),
        most=1,
    ),
    Kind(
        "register late",
        "pod 0 forgets the plan and has other memory, is cut from pods that know it, and a rank registers there that "
        "knows none",
        of_planned(12, least_pods=2),
        _register_late,
        lambda _, chooser: (chooser.randrange(len(_MEMORY_BYTES)), chooser.randrange(2)),
        theme="partitions",
        lasts=(0.5, 8.0),
        most=1,
    ),
    Kind(
        "replace dataset",
        "another dataset is written in place of the job's; 1: while all pods are away",
        of_planned(12),
        _replace_dataset,
        lambda _, chooser: (chooser.randrange(2),),
        theme="replaced",
        most=1,
    ),
]
