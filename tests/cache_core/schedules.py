"""What may happen to a job, as facts that can be drawn, replayed and left out.

A fact is a name of ``FACTS`` and three numbers, which say to whom it happens and how. Whatever was left out before it,
it means something: so a schedule that breaks a promise can be cut down to the few facts that it takes.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from tests.cache_core.job_model import JobModel
from tests.cache_core.pod_model import Shape

Fact = tuple[str, int, int, int]


def drawn_shape(generator: random.Random) -> Shape:
    pick, number = generator.choice, generator.randint
    blobs = tuple(number(1, 16) for _ in range(number(1, 3)))
    return Shape(
        blobs=blobs,
        chunk_size=number(1, min(6, max(blobs))),
        num_pods=number(1, 3),
        num_ranks=number(1, 3),
        policy=pick(["drain", "redox", "exact"]),
        num_epochs=number(1, 3),
        journals=pick([True, False]),
        window=pick([0, 100]),
        remote_bytes=pick([0, 150, 2000]),
        memory_bytes=pick([700, 3000]),
        drop_last=pick([True, False]),
        seed=number(0, 2**16),
    )


def drawn_facts(generator: random.Random) -> list[Fact]:
    names = generator.choices([*FACTS], [weight for weight, _ in FACTS.values()], k=generator.randint(5, 60))
    return [(name, generator.randrange(64), generator.randrange(64), generator.randrange(64)) for name in names]


def replay(shape: Shape, facts: list[Fact]) -> JobModel:
    """Raises AssertionError when a promise is broken. At the end nothing is lost any more, and all is asked for."""
    model = JobModel(shape)
    for name, *numbers in facts:
        FACTS[name][1](model, *numbers)
        model.check()
        if model.lost:
            return model
    _finish(model)
    return model


def cut_down(shape: Shape, facts: list[Fact], error: BaseException) -> list[Fact]:
    """As few of the facts as break the promise in the same way."""

    def still_fails(fewer: list[Fact]) -> bool:
        try:
            replay(shape, fewer)
        except Exception as found:
            return type(found) is type(error) and str(found)[:20] == str(error)[:20]
        return False

    size = len(facts) // 2
    while size:
        at = 0
        while at < len(facts):
            fewer = facts[:at] + facts[at + size :]
            if still_fails(fewer):
                facts = fewer
            else:
                at += size
        size //= 2
    return facts


def _finish(model: JobModel) -> None:
    """Each rank asks for what it lacks, and comes to the epoch of the others."""
    model.time_passes(1000)
    model.deliver_all()
    for epoch in range(min(model.epochs), max(model.epochs) + 1):
        model.finish_epoch(epoch)
        if model.lost:
            return
        model.check_epoch(epoch)
        for rank in range(model.spec.world_size):
            model.epochs[rank] = max(model.epochs[rank], min(epoch + 1, max(model.epochs)))


def _rank(model: JobModel, number: int) -> int:
    return number % model.spec.world_size


def _asks(model: JobModel, who: int, where: int, how: int) -> None:
    """A batch of a rank: of what it lacks, or now and then of what it has had."""
    rank = _rank(model, who)
    epoch, size = model.epochs[rank], 1 + how % 7
    missing, length = model.missing(epoch, rank), model.length(epoch, rank)
    if not length:
        return
    if len(missing) and where < 56:
        first = where % len(missing) if where % 4 == 0 else 0
        positions = missing[first : first + size]
    else:
        positions = np.arange(where % length, min(length, where % length + size))
        for position in positions.tolist():  # asked until it is answered
            model.got[epoch].pop((rank, position), None)
    cut_off = frozenset([where % 3]) if how >= 56 else frozenset[int]()
    model.ask(rank, positions, silent=who >= 60, cut_off=cut_off)


def _asks_for_all(model: JobModel, who: int, where: int, how: int) -> None:
    rank = _rank(model, who)
    missing = model.missing(model.epochs[rank], rank)
    if len(missing):
        model.ask(rank, missing)


def _enters_next_epoch(model: JobModel, who: int, where: int, how: int) -> None:
    rank = _rank(model, who)
    if model.epochs[rank] + 1 < model.shape.num_epochs and not len(model.missing(model.epochs[rank], rank)):
        model.epochs[rank] += 1


def _finishes_epoch(model: JobModel, who: int, where: int, how: int) -> None:
    """It asks for what it lacks, nothing of that is lost, and it goes on to the next."""
    _asks_for_all(model, who, where, how)
    model.deliver_all()
    _enters_next_epoch(model, who, where, how)


def _message_moves(model: JobModel, which: int, where: int, how: int) -> None:
    if model.messages:
        model.message_moves(model.messages[which % len(model.messages)], lost=how < 6)


def _response_arrives(model: JobModel, which: int, where: int, how: int) -> None:
    if model.responses:
        model.response_arrives(model.responses[which % len(model.responses)], lost=how < 10)


def _all_arrives(model: JobModel, who: int, where: int, how: int) -> None:
    model.deliver_all()


def _read_ends(model: JobModel, which: int, where: int, how: int) -> None:
    reading = [pod for pod in model.running if pod.reading]
    if reading:
        model.read_ends(reading[where % len(reading)], which, fails=how < 10)


def _all_reads_end(model: JobModel, who: int, where: int, how: int) -> None:
    model.all_reads_end()


def _pods_are_killed(model: JobModel, who: int, where: int, how: int) -> None:
    """One or several, perhaps with their volumes, or with what was written last."""
    for ordinal in {who % len(model.places), where % len(model.places)}:
        model.kill(ordinal, lose_volume=how < 16, lost_bytes=4 * how if how > 40 else None)


def _pod_comes_up(model: JobModel, who: int, where: int, how: int) -> None:
    model.come_up(who % len(model.places))


def _all_come_up(model: JobModel, who: int, where: int, how: int) -> None:
    for place in model.places:
        place.up = True


def _all_pods_are_replaced(model: JobModel, who: int, where: int, how: int) -> None:
    model.scale(1 + who % 4)


def _recovers_some(model: JobModel, who: int, where: int, how: int) -> None:
    cut_off = frozenset([where % 3]) if how < 16 else frozenset[int]()
    model.recovery_round(who % len(model.places), cut_off=cut_off)


def _all_recover(model: JobModel, who: int, where: int, how: int) -> None:
    model.all_recover()


def _time_passes(model: JobModel, who: int, where: int, how: int) -> None:
    model.time_passes([1, 11, 700][how % 3])


def _process_is_killed(model: JobModel, who: int, where: int, how: int) -> None:
    """It goes on from the last checkpoint: what it has had up to some position is behind it. One that has had all that
    there is does not go on."""
    rank = _rank(model, who)
    missing = model.missing(model.epochs[rank], rank)
    whole = int(missing[0]) if len(missing) else model.length(model.epochs[rank], rank)
    if not len(missing) and model.epochs[rank] + 1 == model.shape.num_epochs:
        whole = max(0, whole - 1)
    model.process_is_killed(rank, whole * (how % 4) // 3)


def _observer_reports(model: JobModel, who: int, where: int, how: int) -> None:
    model.observed(_rank(model, who))


def _looks_after_home(model: JobModel, who: int, where: int, how: int) -> None:
    model.looks_after_home(_rank(model, who))


def _other_memory(model: JobModel, who: int, where: int, how: int) -> None:
    """From the pod's next run on."""
    if model.spec.policy != "redox":  # which keeps as many slots as it had
        model.memory_bytes[who % 4] = [500, 1500, 4000][how % 3]


FACTS: dict[str, tuple[int, Callable[[JobModel, int, int, int], None]]] = {
    "asks": (60, _asks),
    "asks for all": (6, _asks_for_all),
    "enters next epoch": (6, _enters_next_epoch),
    "finishes epoch": (8, _finishes_epoch),
    "message moves": (60, _message_moves),
    "response arrives": (30, _response_arrives),
    "all arrives": (8, _all_arrives),
    "read ends": (20, _read_ends),
    "all reads end": (4, _all_reads_end),
    "pods are killed": (6, _pods_are_killed),
    "pod comes up": (5, _pod_comes_up),
    "all come up": (6, _all_come_up),
    "all pods are replaced": (3, _all_pods_are_replaced),
    "recovers some": (12, _recovers_some),
    "all recover": (4, _all_recover),
    "time passes": (4, _time_passes),
    "process is killed": (3, _process_is_killed),
    "observer reports": (2, _observer_reports),
    "looks after home": (4, _looks_after_home),
    "other memory": (2, _other_memory),
}
"""By name: how often it is drawn, and what happens."""
