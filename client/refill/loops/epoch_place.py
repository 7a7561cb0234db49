"""Where does the next iteration begin? Whole epochs one after another, but for the one that was taken up midway."""

from __future__ import annotations

import operator
import warnings
from typing import NamedTuple

from refill.errors import InvalidInput

_OFTEN = 3
"""So often somebody may look at the first batches of an epoch, or begin it anew after a mistake."""


class Iteration(NamedTuple):
    """One pass of a loop over a rank's epoch: positions ``start`` to ``length``, exclusive."""

    epoch: int
    start: int
    length: int


class EpochPlace:
    """The epoch that was set; after a whole one without a word, the next.

    torch's samplers would repeat the order of the last epoch then. Here its samples are used up, and asking for
    them again means reading them one by one. An epoch that was broken off is served again from where this process
    began it. One that was resumed keeps its place until another epoch is set or all of it was handed out: training
    loops set the epoch that they resume, and may look at a batch first, for which workers may fetch all of the rest.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._handed_out = False
        self._resumed: Iteration | None = None
        self._is_new = False
        """Whether that was taken up since an epoch was set, and no loop has come to its end."""
        self._times_begun = 0
        """Since it was said, or followed from a whole one, which epoch is next."""
        self.was_said = False
        """Whether a loop has ever set an epoch, or taken a place up."""

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def was_resumed(self) -> bool:
        """Whether a place was taken up that another process has left, and not given up since."""
        return self._resumed is not None

    def set_epoch(self, epoch: int) -> None:
        epoch = checked_epoch(epoch)
        self.was_said = True
        was_had = self._handed_out and not self._is_new
        if was_had or (self._resumed is not None and self._resumed.epoch != epoch):
            self._resumed = None
        self._is_new = False
        self._epoch = epoch
        self._handed_out = False
        self._times_begun = 0

    def goes_on(self) -> None:
        """Fact: the next iteration is about to begin, and nobody has said which epoch it is."""
        self._epoch, resumed = self.next()
        self._resumed, self._handed_out = resumed and self._resumed, False
        self._times_begun = 0

    def resume(self, place: Iteration) -> None:
        """Go on at ``place.start``. Where that is the end, the next epoch follows; its own, if set again, is empty."""
        checked_epoch(place.epoch)
        self.was_said = True
        at_end = place.start == place.length > 0
        self._resumed, self._is_new = place, True
        self._epoch = place.epoch + at_end
        self._handed_out = False
        self._times_begun = 0

    def next(self) -> tuple[int, Iteration | None]:
        """The epoch of the next iteration, and the place in it that was resumed."""
        if self._handed_out:
            return self._epoch + 1, None
        resumed = self._resumed
        return self._epoch, resumed if resumed is not None and resumed.epoch == self._epoch else None

    def begin(self, *, shuffled: bool = False) -> tuple[int, Iteration | None]:
        """Fact: an iteration over what :meth:`next` says has begun.

        :param shuffled: whether a loop wants other samples each time, and is told when it gets the same.
        """
        found = self.next()
        if self._handed_out:
            self.goes_on()
        self._times_begun += 1
        if shuffled and self._times_begun == _OFTEN:
            warnings.warn(
                f"epoch {self._epoch} begins for the third time, with the same samples in the same order, as the "
                "loop broke it off each time: call set_epoch(epoch) before each epoch, or keep one iterator to go on",
                stacklevel=3,
            )
        return found

    def handed_out(self, epoch: int) -> None:
        """Fact: an iteration over this epoch has come to its end. A loop may not have all of it yet, nor ever want
        it."""
        if epoch == self._epoch:
            self._handed_out = True

    def was_had(self, epoch: int) -> None:
        """Fact: so has the loop."""
        if epoch == self._epoch:
            self._handed_out, self._is_new = True, False

    def was_left(self, epoch: int) -> None:
        """Fact: a loop has left it before its end, however far workers were."""
        if epoch == self._epoch:
            self._handed_out = False


def checked_epoch(epoch: int) -> int:
    """Of any type that counts, such as NumPy's. Raises :class:`InvalidInput` for what is no epoch."""
    try:
        number = -1 if isinstance(epoch, bool) else operator.index(epoch)
    except TypeError:
        number = -1
    if not 0 <= number < 2**31:
        raise InvalidInput(f"epoch must be 0 to {2**31 - 1}, got {epoch!r}")
    return number
