"""Everything that can go wrong in refill, on both sides of the wire.

All errors are in one tree, below, with the HTTP status of each. A pod answers with an error's ``status`` and its
``to_wire()``, and the client turns that back into the same class. The text is one line that says what was wrong and
what to do. What a program needs is in attributes.

    RefillError
    |-- InvalidInput               400  an argument, a setting or a frame that can't be right
    |   |-- MemoryTooSmall         400  the budget does not hold one chunk
    |   |-- RequestTooSlow         408  the request's body did not come in time
    |   |-- RequestTooLarge        413  the request's body is longer than anything sensible
    |   `-- HeadersTooLarge        431  the request's address and headers are
    |-- AccessError
    |   |-- NotAuthenticated       401  no token, or none that the pod knows
    |   `-- NotAllowed             403  a job of another team or token, or a dataset that jobs may not name
    |-- DatasetError
    |   |-- DatasetNotFound        404  no index at that URL
    |   |-- DatasetExists          409  `pack` would overwrite one
    |   |-- DatasetReplaced        409  a blob, or the index, is not what was indexed, or what a job began with
    |   |-- EmptyDataset           400  nothing to pack or index
    |   |-- IndexDamaged           500  the index is truncated or its checksum is wrong
    |   |-- IndexVersionUnsupported 400 the index was written by another version
    |   `-- SampleDamaged          500  bytes in a blob are not those that were packed
    |-- StoreError
    |   |-- StoreNotFound          404  no such bucket or object
    |   |-- StoreDenied            403  credentials missing, wrong, or without the right
    |   `-- StoreUnavailable       503  the store did not answer in time (retried already)
    |-- JobError
    |   |-- UnknownJob             404  never registered here, or ended since
    |   |-- JobConflict            409  registered before with other settings
    |   |-- JobLost                409  a pod was restarted, and a live policy's job with it: the epoch begins anew
    |   |-- SamplesSkipped         409  a rank left out some of its positions: their samples would be lost
    |   |-- EpochEnded             410  the job has moved on to a later epoch
    |   |-- RankTaken              409  another process is this rank of the job already
    |   |   `-- RankHeld           503  another process was this rank a moment ago: ask again
    |   `-- EpochNotReady          503  other ranks have not finished the epoch before, or not posted their orders
    `-- PodUnreachable             503  a pod did not answer in time
        |-- PodBusy                503  the pod has as much to do as it may: ask again
        `-- PodStopping            503  the pod ends, and takes nothing new: ask again, or ask another
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "AccessError",
    "DatasetError",
    "DatasetExists",
    "DatasetNotFound",
    "DatasetReplaced",
    "EmptyDataset",
    "EpochEnded",
    "EpochNotReady",
    "HeadersTooLarge",
    "IndexDamaged",
    "IndexVersionUnsupported",
    "InvalidInput",
    "JobConflict",
    "JobError",
    "JobLost",
    "MemoryTooSmall",
    "NotAllowed",
    "NotAuthenticated",
    "PodBusy",
    "PodStopping",
    "PodUnreachable",
    "RankHeld",
    "RankTaken",
    "RefillError",
    "RequestTooLarge",
    "RequestTooSlow",
    "SampleDamaged",
    "SamplesSkipped",
    "StoreDenied",
    "StoreError",
    "StoreNotFound",
    "StoreUnavailable",
    "UnknownJob",
    "error_from_wire",
]


_MOST_LETTERS = 4000
_NEVER_OF_PODS = (501, 505)
"""Statuses by which another server says that it never does what was asked."""


class RefillError(Exception):
    """Base of all errors of refill. ``details`` holds JSON-able facts beside the text.

    The text may hold what somebody sent: of one that is very long, beginning and end are kept.
    """

    status: ClassVar[int] = 500

    def __init__(self, message: str, **details: Any) -> None:
        if len(message) > _MOST_LETTERS:
            message = f"{message[: _MOST_LETTERS // 2]} ... {message[-_MOST_LETTERS // 2 :]}"
        super().__init__(message)
        self.message = message
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        # DataLoader workers send errors to the training process by pickle; keep the details on that way.
        return (_rebuild, (type(self), self.message, self.details))

    def to_wire(self) -> dict[str, Any]:
        """The JSON object that a pod answers with."""
        return {"error": type(self).__name__, "message": self.message, "details": self.details}


class InvalidInput(RefillError):
    status = 400


class MemoryTooSmall(InvalidInput):
    pass


class RequestTooSlow(InvalidInput):
    status = 408


class RequestTooLarge(InvalidInput):
    status = 413


class HeadersTooLarge(InvalidInput):
    status = 431


class AccessError(RefillError):
    status = 403


class NotAuthenticated(AccessError):
    status = 401


class NotAllowed(AccessError):
    pass


class DatasetError(RefillError):
    pass


class DatasetNotFound(DatasetError):
    status = 404


class DatasetExists(DatasetError):
    status = 409


class DatasetReplaced(DatasetError):
    """Details: ``dataset`` (URL), and ``blob`` (name) or ``index`` (URL)."""

    status = 409


class EmptyDataset(DatasetError):
    status = 400


class IndexDamaged(DatasetError):
    pass


class IndexVersionUnsupported(DatasetError):
    status = 400


class SampleDamaged(DatasetError):
    """Details: ``blob`` (name), ``sample`` (id), ``start`` and ``end`` (byte range in the blob, end exclusive)."""


class StoreError(RefillError):
    pass


class StoreNotFound(StoreError):
    status = 404


class StoreDenied(StoreError):
    status = 403


class StoreUnavailable(StoreError):
    status = 503


class JobError(RefillError):
    pass


class UnknownJob(JobError):
    status = 404


class JobConflict(JobError):
    status = 409


class JobLost(JobError):
    """Details: those of :func:`job_lost`: ``job``, ``why``, ``epoch``."""

    status = 409


class SamplesSkipped(JobError):
    """Details: ``epoch``, ``rank``, ``start`` and ``end`` of the first positions left out, end exclusive."""

    status = 409


class EpochEnded(JobError):
    status = 410


class RankTaken(JobError):
    """Details: ``rank``, ``holder`` (:mod:`refill.protocol.rank_life`), ``held_seconds``."""

    status = 409


class RankHeld(RankTaken):
    status = 503


class EpochNotReady(JobError):
    status = 503


class PodUnreachable(RefillError):
    status = 503


class PodBusy(PodUnreachable):
    pass


class PodStopping(PodUnreachable):
    pass


def error_from_wire(answer: Any, *, status: int, source: str) -> RefillError:
    """The error that a pod answered with.

    :param answer: the decoded JSON body, or anything else when the answer did not come from refill.
    :param status: the HTTP status, used when the body names no error of ours.
    :param source: who answered, for the text.
    """
    known = _BY_NAME.get(str(answer.get("error"))) if isinstance(answer, dict) else None
    if known is not None:
        error = known(str(answer.get("message", "")))
        details = answer.get("details")
        error.details = dict(details) if isinstance(details, dict) else {}
        return error
    # A pod names its own errors: what has another form came from a server in between, or from one whose pod is ending.
    kind: type[RefillError] = InvalidInput if status < 500 or status in _NEVER_OF_PODS else PodUnreachable
    text = " ".join(str(answer).split())[:200]
    return kind(f"{source} answered with status {status}: {text}")


def _rebuild(kind: type[RefillError], message: str, details: dict[str, Any]) -> RefillError:
    return kind(message, **details)


def _all_kinds(kind: type[RefillError]) -> list[type[RefillError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _all_kinds(child))]


_BY_NAME = {kind.__name__: kind for kind in _all_kinds(RefillError)}
