"""Where does a rank of a planned job go on from a state of its loop? By the plan that the state holds."""

from __future__ import annotations

import dataclasses

from refill.errors import InvalidInput
from refill.planned_connection import PlannedConnection
from refill.resume_state import ResumeState

__all__ = ["goes_on_from", "state_at"]


def goes_on_from(state: ResumeState, connection: PlannedConnection) -> ResumeState:
    """The place of this rank in what a state leaves of its epoch; dealt anew if the number of ranks has changed.

    Raises :class:`InvalidInput` for the state of a job that was not planned, and for one that has other lengths.
    """
    if state.plan is None:
        raise InvalidInput(
            f"the state is of job {state.job} by another policy, or an earlier version: it can't go on with policy "
            "planned; start the epoch over, without it"
        )
    connection.goes_by(state.plan)
    same_ranks = state.num_groups == connection.spec.num_groups
    num_positions = connection.info()["num_samples"]
    if state.at_end or not state.position:
        start, position = (0, 0) if state.at_end else (state.start, 0)
    elif same_ranks:
        start, position = state.start, state.position
    else:
        start, position = min(state.num_had, num_positions), 0
    connection.deals(state.epoch, start, position)
    length = connection.dealing(state.epoch).per_rank
    if state.at_end:
        position = length
    elif same_ranks and state.length and state.length != length:
        raise InvalidInput(
            f"the state counts {state.length} samples of rank {state.rank} in epoch {state.epoch}, and there are "
            f"{length}: the dataset or drop_last has changed since it was saved"
        )
    return dataclasses.replace(
        state,
        incarnation=connection.plan_id,
        world_size=connection.spec.world_size,
        group=connection.spec.batch_group,
        rank=connection.rank,
        position=position,
        length=length,
        start=start,
    )


def state_at(connection: PlannedConnection, epoch: int, position: int, length: int) -> ResumeState:
    """Of a loop of this rank that has come to ``position`` of the ``length`` positions of an epoch."""
    spec = connection.spec
    return ResumeState(
        spec.name,
        spec.dataset,
        connection.plan_id,
        spec.world_size,
        connection.rank,
        epoch,
        position,
        length,
        plan=connection.plan,
        start=connection.dealing(epoch).start,
        group=spec.batch_group,
    )
