"""Who has called? What libraries do not say otherwise is known from the frames of this thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def callers(past: int = 0, most: int = 100) -> Iterator[FrameType]:
    """Frames of whoever iterates this, and of all its callers, inner ones first.

    :param past: so many of the first are left out.
    :param most: frames. Between a dataset in somebody's generators and the loader that started the worker, there are
        some thirty; between a trainer and its sampler some ten, and thirty more of datasets.
    """
    frame: FrameType | None = sys._getframe(1 + past)
    for _ in range(most):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
