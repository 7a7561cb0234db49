"""Which of several iterations is the loop's? One may look at a batch of its own loader, or pass over all of it, while
it goes on."""

from __future__ import annotations

from refill.loops.epoch_place import Iteration

__all__ = ["NestedLoops", "Steps"]


class Steps:
    """How far one iteration has come."""

    def __init__(self, iteration: Iteration | None = None) -> None:
        self.has_begun = False
        self.is_again = False
        """Whether another one has come to the end of these samples before, so that a look at them moves no loop."""
        self.iteration = iteration
        """None: it has not begun, or its state is not known."""
        self.position = 0 if iteration is None else iteration.start
        """The first of it that the loop has not been given, where that is not told by batches."""
        self.batches = 0
        """Those that the loop was given, and those that failed before the last one of these."""
        self.failed = 0
        """Since that one. They count when the loop goes on: one that stops there may want them again."""
        self.is_uneven = False
        """Whether what failed was more or less than a batch."""
        self.at_end = False


class NestedLoops:
    """The iterations over one loader, of which each counts for itself.

    The loop's is the one that was asked last of those that are not left, so that an inner one does not count once it is
    left. An iterator that somebody has kept after a look, of one batch, is no loop that another one lies in.
    """

    def __init__(self) -> None:
        self._under_way: list[Steps] = []
        """By when they were asked last."""
        self._left_last: Steps | None = None
        self._is_left = True

    @property
    def is_left(self) -> bool:
        """Whether the one that was asked last is left, at its end or before."""
        return self._is_left

    def counts(self) -> Steps | None:
        """The loop's; None: none has begun."""
        return self._under_way[-1] if self._under_way else self._left_last

    def is_under_way(self, steps: Steps) -> bool:
        return steps in self._under_way

    def give_up(self) -> None:
        """Fact: another place was set, and a loop begins there. Those before count when they are asked again."""
        self._under_way.clear()

    def asked(self, steps: Steps) -> None:
        """Fact: the loop wants a batch of this one."""
        last = self._left_last
        if not steps.has_begun:
            steps.has_begun = True
            steps.is_again = last is not None and last.at_end and last.iteration is steps.iteration
        if steps in self._under_way:
            self._under_way.remove(steps)
        self._under_way.append(steps)
        self._is_left = False

    def left(self, steps: Steps) -> bool:
        """Fact: it came to its end, or failed, or the loop has left it. Returns whether it was under way."""
        if steps not in self._under_way:
            return False
        self._under_way.remove(steps)
        self._is_left = True
        if steps.batches > 1:
            self._under_way = [each for each in self._under_way if each.batches > 1]
        if not steps.is_again:
            self._left_last = steps
        return True
