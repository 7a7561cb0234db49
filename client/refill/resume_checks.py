"""May a rank go on from a state of its loop? It must be of this job, and pods must know what they gave before it."""

from __future__ import annotations

from refill.delivery_record import DeliveryRecord
from refill.errors import InvalidInput, JobLost
from refill.pod_connection import PodConnection
from refill.protocol.incarnation import line_of
from refill.protocol.wire_format import Int64Array
from refill.resume_state import ResumeState

__all__ = ["check_is_of", "check_is_remembered", "check_num_ranks"]


def check_is_of(state: ResumeState, name: str, url: str) -> None:
    """Raises :class:`InvalidInput` for the state of another job than this name's, or of another dataset. A plan names
    its dataset by fingerprint, wherever that lies, and pods compare it."""
    for what, saved, here in (("job", state.job, name), ("dataset", state.dataset, url)):
        if saved != here and not (what == "dataset" and state.plan is not None):
            raise InvalidInput(
                f"the state is of {what} {saved!r}, not {here!r}: another {what} starts its epochs anew, without it"
            )


def check_num_ranks(state: ResumeState, world_size: int, policy: str) -> None:
    """Raises :class:`InvalidInput` for a state of another number of ranks than this job has, whose order is not
    planned."""
    if state.world_size != world_size:
        raise InvalidInput(
            f"the state was saved with world_size {state.world_size}, and this job has {world_size}: with policy "
            f"{policy} that begins the epoch anew: end the job (refill end {state.job}), and call "
            f"set_epoch({state.next_place[0]}) in place of loading the state. Policy planned goes on"
        )


def check_is_remembered(
    state: ResumeState, consumed: Int64Array, connection: PodConnection, record: DeliveryRecord
) -> None:
    """As :meth:`CacheDataset.must_remember`.

    :param record: what this process has received.
    """
    spec, incarnation = connection.spec, connection.info()["incarnation"]
    in_fixed_order = spec.order == "keyed" and not spec.shuffle
    if line_of(state.incarnation) != line_of(incarnation) and not in_fixed_order:
        raise JobLost(
            f"job {state.job} was registered anew since the state was saved, so the pods don't know which samples "
            f"the loop has had of epoch {state.epoch}: without the state, set_epoch({state.epoch}) starts it over",
            job=state.job,
        )
    if not in_fixed_order and not record.resumes_within(state.epoch, consumed):
        raise JobLost(
            f"job {state.job} moved to other pods before the state was loaded, and they were not told what the "
            f"loop has had of epoch {state.epoch}: load states before anything else is asked of the dataset",
            job=state.job,
        )
