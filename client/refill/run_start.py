"""Does a dataset object begin without a state? If a run of its job has ended, it then begins a new one."""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any

from refill.own_life import loader_worker

__all__ = ["RunStart"]

_STATE_LOADED, _RECEIVED, _BEGAN_AGAIN = range(3)


class RunStart:
    """Of one dataset object, and of its copies in loader workers.

    :param shared: three zeros in memory that these share.
    """

    NUM_SHARED = 3

    def __init__(self, shared: MutableSequence[Any] | Any) -> None:
        self._shared = shared

    def state_was_loaded(self) -> None:
        """Fact: the loop goes on where another process stood."""
        self._shared[_STATE_LOADED] = 1

    def received(self) -> None:
        """Fact: a batch has come."""
        if not self._shared[_RECEIVED]:
            self._shared[_RECEIVED] = 1

    def begins_again(self) -> None:
        """Fact: the run had ended, and this object begins a new one."""
        self._shared[_BEGAN_AGAIN] = 1

    @property
    def has_begun_again(self) -> bool:
        return bool(self._shared[_BEGAN_AGAIN])

    @property
    def is_anew(self) -> bool:
        """Whether nothing that the object asks for goes on from anything before."""
        return not self._shared[_STATE_LOADED] and not self._shared[_RECEIVED]

    @property
    def asks_first(self) -> bool:
        """Whether no loader worker of this process asks for anything before what is asked for here first: workers take
        batches in turn, and worker 0 has the first."""
        return not loader_worker()
