"""Does a job stay exact, and its pods as they are, for hours of this? One event a minute, drawn at random.

All that is known is written after each event, and at the end, however that comes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster.cluster import Failed
from tests.cluster.events import Event
from tests.cluster.memory import MemoryWatch
from tests.cluster.ranks import Ranks
from tests.cluster.rows import Row
from tests.cluster.soak_files import TIME_UP, Done, Epoch, InMemory, Span, Tables, rates_of
from tests.cluster.soak_report import plot

__all__ = ["SOAKED", "Soak"]

SOAKED = {
    *("delete", "forced", "rolling", "rollback", "scale", "grow", "shrink", "grow-at-once", "again", "drain"),
    *("all", "evicted", "rotate", "dns", "dns-delete", "api"),
}
"""Events after which any other can come, in about a minute."""


class Soak:
    """One soak of a job that runs.

    :param watch: looks at the memory of pods and ranks meanwhile.
    :param do: does an event, and says what came of it.
    :param folder: where its tables and the plot go.
    """

    def __init__(self, ranks: Ranks, watch: MemoryWatch, do: Callable[[Event], Row], folder: Path) -> None:
        self._ranks, self._watch, self._do, self._folder = ranks, watch, do, folder
        self._began = time.time()
        self._span = Span(0.0, "")
        self._done: list[Done] = []

    def run(self, events: list[Event], minutes: float, seed: int, pause_seconds: float = 60) -> None:
        """Until time is up. Raises :class:`RanksEnded` when nothing is left to look at."""
        draw = random.Random(seed)
        self._began, self._span = time.time(), Span(minutes, "")
        self.keep()
        until = self._began + 60 * minutes
        left = list(events)
        try:
            while (began := time.time()) < until:
                if not left:
                    raise Failed(f"this cluster can do none of {', '.join(event.name for event in events)}")
                event = draw.choice(left)
                row = self._do(event)
                if row.exact.startswith("skipped"):
                    left.remove(event)  # until another one was done: a rollback needs something to go back from
                    continue
                left = list(events)
                longest = row.longest_seconds or 0.0
                ended = time.time()
                self._done.append(
                    Done(began - self._began, ended - self._began, event.says, row.exact, longest, row.said)
                )
                self.keep()
                time.sleep(max(0.0, min(until, began + pause_seconds) - time.time()))
            self._span = Span(minutes, TIME_UP)
        except BaseException as error:
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
            self._span = Span(minutes, why)
            raise
        finally:
            plot(self.keep(), self._folder / "soak.svg")

    def keep(self) -> Tables:
        """Writes what there is until now."""
        self._folder.mkdir(parents=True, exist_ok=True)
        epochs = [
            Epoch(epoch, self._ranks.wrong_in(epoch), self._ranks.receipts.get(epoch, ""))
            for epoch in range(self._ranks.finished())
        ]
        rates = rates_of(self._ranks.came_at(), self._began, time.time())
        memory = [
            InMemory(looked.at - self._began, looked.pod, looked.life, *looked.memory)
            for looked in list(self._watch.looked)
            if looked.at >= self._began
        ]
        tables = Tables([self._span], list(self._done), epochs, rates, memory)
        tables.write(self._folder)
        return tables
