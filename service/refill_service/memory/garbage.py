"""When does a pod look for garbage? Among what is new often, among what stays hardly ever.

Python looks through everything that a process holds again and again: 10 ms in which a pod that has some jobs answers
nobody, several times a second while clients come and go. Requests and connections leave no garbage that has to be
looked for (``tests/security/test_no_garbage.py``). So what the second look has found to be in use is not looked through
again here, until there is twice as much in memory as there was. The pauses of a pod that serves are short, and what
becomes garbage later is found all the same: it takes no more than as much memory again.
"""

from __future__ import annotations

import gc
import sys

__all__ = ["looked_for_in_pieces"]

_NEW, _OLDEST = 0, 2
"""The first and the last of Python's three generations."""
_THRESHOLDS = (700, 5)
"""Of objects, and of looks among these: more often than Python's own, in smaller pieces."""
_NEVER, _NEXT = 1 << 30, 1
_OBJECTS_BETWEEN = 200_000
"""That were found to be in use, from one count of all to the next."""
_FEW_BLOCKS = 500_000
"""Of memory: so many more than twice as many as there were are no reason yet. Python counts these in a tenth of a
millisecond, and objects in use, one by one, in ten."""


def looked_for_in_pieces() -> None:
    """From now on, as long as the process lives. Everything that there is counts as in use."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS, _NEVER)
    gc.callbacks.append(_Looks().after)


class _Looks:
    def __init__(self) -> None:
        self._added = 0
        """Objects that were found to be in use since all were counted. Most of them have gone again."""
        self._there_were = sys.getallocatedblocks()
        """When everything was looked through."""
        self._is_at_all = False
        """The look that comes next."""

    def after(self, phase: str, info: dict[str, int]) -> None:
        """Python calls it before and after each look."""
        if phase != "stop" or info["generation"] == _NEW:
            return
        if not self._is_at_all:
            self._added += len(gc.get_objects(_OLDEST))
            gc.freeze()
            if self._added > _OBJECTS_BETWEEN:
                self._added = 0
                if sys.getallocatedblocks() > 2 * self._there_were + _FEW_BLOCKS:
                    gc.unfreeze()
                    gc.set_threshold(*_THRESHOLDS, _NEXT)
                    self._is_at_all = True
        elif info["generation"] == _OLDEST:
            gc.freeze()
            gc.set_threshold(*_THRESHOLDS, _NEVER)
            self._added, self._there_were, self._is_at_all = 0, sys.getallocatedblocks(), False
