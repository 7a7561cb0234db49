"""What does the log say of damaged samples that a rank goes on without? Each of the first few by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from refill.errors import RefillError

log = logging.getLogger(__name__)

_NAMED = 20


class DamageLog:
    """Logs the damaged samples that one process goes on without."""

    def __init__(self) -> None:
        self._count = 0

    def goes_without(self, job: str, why: Sequence[RefillError]) -> None:
        """Fact: so many samples are damaged, and the job goes on without them."""
        for error in why[: max(0, _NAMED - self._count)]:
            log.warning("job %s goes on without a sample: %s", job, error)
        if self._count < _NAMED <= self._count + len(why):
            log.warning("job %s: this process names no further damaged samples; receipts do", job)
        self._count += len(why)
