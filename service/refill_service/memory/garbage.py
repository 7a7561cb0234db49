"""When does a pod look for garbage? Among what is new often, among what stays hardly ever.

Python looks through everything that a process holds again and again: 10 ms in which a pod that has some jobs answers
nobody, several times a second while clients come and go. What a look has found to be in use is not looked through again
here, until as much has been added as there was. So the pauses of a pod that serves are short, and what becomes garbage
later is found all the same: it takes no more than as much memory again.
"""

from __future__ import annotations

import gc

__all__ = ["looked_for_in_pieces"]

_THRESHOLDS = (700, 5, 3)
"""Of Python's three generations: more often than Python's own, in smaller pieces."""
_OLDEST = 2
_FEW_OBJECTS = 100_000
"""So many more than twice as many as there were are no reason yet."""


def looked_for_in_pieces() -> None:
    """From now on, as long as the process lives. Everything that there is counts as in use."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.callbacks.append(_Looks().after)


class _Looks:
    def __init__(self) -> None:
        self._added = 0
        """Objects that were found to be in use since all were counted. Most of them have gone again."""
        self._there_were = gc.get_freeze_count()
        """When everything was looked through."""
        self._is_at_all = False
        """The look that comes next."""

    def after(self, phase: str, info: dict[str, int]) -> None:
        """Python calls it before and after each look."""
        if phase != "stop" or info["generation"] != _OLDEST:
            return
        self._added += len(gc.get_objects(_OLDEST))
        gc.freeze()
        if self._is_at_all:
            self._added, self._there_were, self._is_at_all = 0, gc.get_freeze_count(), False
        elif self._added > self._there_were + _FEW_OBJECTS:
            self._added = 0
            if gc.get_freeze_count() > 2 * self._there_were + _FEW_OBJECTS:
                gc.unfreeze()
                self._is_at_all = True
