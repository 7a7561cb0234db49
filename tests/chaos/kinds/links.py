"""How does the network fail? Between two pods, and between a rank and the pods: cut, reset in mid-answer, slow."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.chaos.kinds.kind import Kind, a_rank
from tests.chaos.schedule import Fault, Setting
from tests.chaos.tcp_relay import Link

if TYPE_CHECKING:
    from tests.chaos.chaos_run import ChaosRun

_ANSWERS_RESET = 2
_DELAY_SECONDS = 0.05


def _to_links(run: ChaosRun, fault: Fault) -> bool:
    how, _, what = fault.kind.partition(" ")
    if what == "rank":
        if fault.target[0] >= len(run.ranks):
            return False
        links = run.links_of_rank(fault.target[0])
    else:
        links = run.links_of_pods(fault.target[0], fault.target[1])
    if not links:
        return False
    for link in links:
        if how == "reset":
            link.resets += _ANSWERS_RESET
        elif how == "cut":
            link.cut = True
        else:
            link.delay_seconds = _DELAY_SECONDS
    if how != "reset":
        run.then(fault, f"{fault.kind} {fault.target} ends", lambda: _heal(run, fault, how, links))
    return True


def _heal(run: ChaosRun, fault: Fault, how: str, links: list[Link]) -> None:
    for link in links:
        link.cut, link.delay_seconds = False, 0.0
        if how == "cut" and int(fault.seconds * 100) % 2:  # some find their connections alive, some dead
            run.relay.reset(link)


def _two_pods(setting: Setting, chooser: random.Random) -> tuple[int, ...]:
    return chooser.choice([(a, b) for a in range(setting.pods) for b in range(setting.pods) if a != b])


def _of_pods(weight: int) -> Callable[[Setting], int]:
    return lambda setting: weight * (setting.pods > 1)


_AT_ONCE = (0.0, 0.0)

KINDS = [
    Kind("cut pods", "nothing goes from one pod to another, and neither is told", _of_pods(2), _to_links, _two_pods),
    Kind("reset pods", "answers between them end in the middle", _of_pods(2), _to_links, _two_pods, lasts=_AT_ONCE),
    Kind("delay pods", "every piece between them is 50 ms late", _of_pods(1), _to_links, _two_pods),
    Kind("cut rank", "nothing goes between a rank and the pods, and neither is told", lambda _: 1, _to_links, a_rank),
    Kind("reset rank", "answers to a rank end in the middle", lambda _: 2, _to_links, a_rank, lasts=_AT_ONCE),
]
