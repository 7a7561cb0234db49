"""How much has each pod answered, as others have heard? So that a journal that is older than that is found out.

With each request to another pod, and each answer, a pod says how many requests its table of the epoch has answered so
far. A journal that was put back as a whole agrees with itself; it knows of fewer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["HeardAnswers", "encode_count", "what_is_missing"]

_KEPT_EPOCHS = 3
_COUNT = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})")


def encode_count(epoch: int, count: int) -> str:
    return f"{epoch}.{count}"


class HeardAnswers:
    """Of one job, as one pod has heard."""

    def __init__(self) -> None:
        self._heard: dict[int, dict[int, int]] = {}

    def count_came(self, pod: int, text: str) -> None:
        """Fact: a pod has said what :func:`encode_count` makes. Anything else is ignored."""
        if (said := _COUNT.fullmatch(text)) is None:
            return
        epoch, count = said.groups()
        of_pod = self._heard.setdefault(pod, {})
        of_pod[int(epoch)] = max(int(count), of_pod.get(int(epoch), 0))
        while len(of_pod) > _KEPT_EPOCHS:
            del of_pod[min(of_pod)]

    def of(self, pod: int) -> dict[int, int]:
        """By epoch, how many requests the pod has answered, at least."""
        return dict(self._heard.get(pod, {}))


def what_is_missing(journal: Mapping[int, int], heard: Mapping[int, int]) -> str | None:
    """What a journal lacks, in words; None: nothing that was heard of.

    :param journal: by epoch, how many requests it says were answered. Epochs before its first may be over for good.
    """
    first = min(journal, default=0)
    for epoch, count in sorted(heard.items()):
        if epoch >= first and count > journal.get(epoch, 0):
            return (
                f"it has {journal.get(epoch, 0):,} answers of epoch {epoch}, and other pods have heard of {count:,}: "
                "an earlier copy"
            )
    return None
