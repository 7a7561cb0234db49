"""What a process that a test starts says of its rank. Apart: a spawned one imports its function's file, not torch."""

from __future__ import annotations

import os
from typing import Any

from refill.pods.own_life import leaves_the_rank_to
from refill.protocol.rank_life import RankLife

__all__ = ["leaves"]


def leaves(answers: Any, life: RankLife, made_in: int | None) -> None:
    """:param made_in: the process that made the dataset object; None: this one."""
    answers.put(leaves_the_rank_to(life, os.getpid() if made_in is None else made_in))
