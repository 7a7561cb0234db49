"""Is it what a pod would answer? Whatever else comes ends in an error of ours that names who sent it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from refill.errors import RefillError
from refill.pods.pod_link import checked_url

_MOST_PODS = 1 << 16
_WHOLE_NUMBERS = ("num_samples", "samples_per_rank")


def not_of_a_pod(source: str, what: str) -> RefillError:
    return RefillError(f"{source} answered, but not as a pod does: {what[:200]}")


@contextmanager
def read_as_of_a_pod(source: str) -> Iterator[None]:
    """Around what takes an answer apart. Errors of ours pass."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
        raise not_of_a_pod(source, f"{type(error).__name__}: {error}") from error


def decoded(text: bytes) -> Any:
    """JSON. Raises ValueError for anything else, also for what is nested deeper than Python can follow."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def checked_pods(answer: dict[str, Any], source: str) -> list[str]:
    """URLs of all pods."""
    found = answer.get("pods")
    if not isinstance(found, list) or len(found) > _MOST_PODS or not all(isinstance(url, str) for url in found):
        raise not_of_a_pod(source, f"its pods are {str(found)[:100]}")
    with read_as_of_a_pod(source):
        return [checked_url(url) for url in found]


def checked_num_samples(answer: dict[str, Any], source: str) -> int:
    """What a pod says of a dataset."""
    found = answer.get("num_samples")
    if type(found) is not int or not 0 <= found < 2**62:
        raise not_of_a_pod(source, f"of the dataset it says {str(answer)[:100]}")
    return found


def checked_job(answer: dict[str, Any], source: str) -> dict[str, Any]:
    """What a pod says of a job that is registered, by the types of what the client uses."""
    checked_pods(answer, source)
    incarnation, metadata = answer.get("incarnation"), answer.get("metadata", {})
    numbers = [answer.get(name, 0) for name in _WHOLE_NUMBERS]
    right = (
        isinstance(incarnation, str)
        and isinstance(metadata, dict)
        and all(type(number) is int and 0 <= number < 2**62 for number in numbers)
    )
    if not right:
        raise not_of_a_pod(source, f"of the job it says {str(answer)[:100]}")
    return answer
