"""What processes do that tests start by ``multiprocessing``. Apart: one that is spawned imports its function's file."""

from __future__ import annotations

from typing import Any

import numpy as np

from refill.errors import RankTaken
from refill.pods.pod_connection import PodConnection

__all__ = ["answers_requests", "asks"]


def answers_requests(connection: PodConnection, pipe: Any) -> None:
    while (request := pipe.recv()) is not None:
        epoch, start, end = request
        try:
            pipe.send(connection.batch(epoch, np.arange(start, end)).sample_ids.tolist())
        except RankTaken as error:
            pipe.send(error.message)


def asks(connection: PodConnection, answers: Any) -> None:
    try:
        answers.put(connection.batch(0, np.arange(10)).sample_ids.tolist())
    except RankTaken as error:
        answers.put(error.message)
