"""What does an owner say of an epoch, while it runs and when it is over for good?

Its receipt, and how often its samples are drawn. An epoch that nobody can ask for any more closes its books: its
receipt is final, and leaves with ``epoch_ended``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from refill.errors import EpochNotReady, InvalidInput
from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.owner_machine import Answered, OpenEpoch, OwnerMachine
from refill_service.cache_core.policies.interface import NO_SAMPLES
from refill_service.cache_core.receipt import EpochReceipt, draws_of, receipt_of
from refill_service.jobs.job import Job
from refill_service.jobs.running_epoch import RunningEpoch


class EpochBooks:
    """Opens, counts and closes the epochs of one owner.

    :param running: the owner's epochs that are open. One that has ended stays until its books are closed.
    """

    def __init__(self, job: Job, machine: OwnerMachine, running: dict[OpenEpoch, RunningEpoch]) -> None:
        self.epoch_ended: Callable[[int], Awaitable[None]] | None = None
        """Called when an epoch will not be asked for again, and its receipt is final."""
        self.closing: set[asyncio.Task[None]] = set()
        """Of epochs whose receipts are being written."""
        self._job = job
        self._machine = machine
        self._running = running
        self._passed_by: dict[int, Traces] = {}
        """Epochs that ended without a request to this pod, while their receipts are written."""

    @property
    def epochs_begun(self) -> list[int]:
        """Those that have no final receipt yet and that a rank has entered, whether or not it asked for anything
        here."""
        ranks = self._job.ranks
        found = {running.number for running in self._running.values()} | {at for _, at in ranks}
        found |= set(self._job.traced_epochs)
        return sorted(epoch for epoch in found if epoch <= ranks.newest)

    def has_opened(self, epoch: int) -> bool:
        """Whether this owner was asked for anything in an epoch that has no final receipt yet."""
        return self._open(epoch) is not None

    async def receipt(self, epoch: int) -> EpochReceipt:
        """What this owner delivered in an epoch, or assigned to be sent ahead.

        Raises :class:`InvalidInput` for one that has not begun, and :class:`EpochNotReady` while nobody knows what is
        asked of this owner in it.
        """
        if (state := self._open(epoch)) is not None:
            return await self._receipt_of(self._machine.answered_of(state.epoch), state.epoch.traces)
        job = self._job
        if epoch > job.ranks.newest:
            raise InvalidInput(f"epoch {epoch} of job {job.spec.name} has not begun, or is long over")
        if (traces := self._traces(epoch)) is None:
            raise EpochNotReady(f"epoch {epoch} of job {job.spec.name} waits for the traces of its ranks")
        return await self._receipt_of((NO_SAMPLES, NO_SAMPLES), traces)

    async def draws(self, epoch: int) -> dict[str, int] | None:
        """How often the samples of the share are drawn in an epoch. None for a job that draws none, or where that is
        not known."""
        traces = self._traces(epoch) if (state := self._open(epoch)) is None else state.epoch.traces
        if traces is None or not self._job.is_by_importance:
            return None
        share = self._job.share
        return await asyncio.to_thread(draws_of, traces, share.first_sample, share.end_sample)

    def close(self, over: RunningEpoch) -> None:
        """Fact: this epoch will not be asked for again."""
        over.payloads.clear()
        self.forget_traces(before_epoch=over.number + 1)
        self._leave_receipt(over.number, lambda: self._running.pop(over.epoch))

    def forget_traces(self, before_epoch: int) -> None:
        """Fact: epochs before this one will not be asked for again. One that asked nothing of this pod leaves a
        receipt, too, as long as its traces are there."""
        for epoch in self._job.traced_epochs:
            if epoch < before_epoch and not self.has_opened(epoch):
                traces = self._job.known_traces(epoch)
                if traces is not None and epoch not in self._passed_by:
                    self._passed_by[epoch] = traces
                    self._leave_receipt(epoch, partial(self._passed_by.pop, epoch))
        self._job.forget_traces(before_epoch)

    def _leave_receipt(self, epoch: int, done: Callable[[], object]) -> None:
        async def leave() -> None:
            try:
                if self.epoch_ended is not None:
                    await self.epoch_ended(epoch)
            finally:
                done()

        task = asyncio.create_task(leave())
        self.closing.add(task)
        task.add_done_callback(self.closing.discard)

    def _open(self, epoch: int) -> RunningEpoch | None:
        return next((running for running in self._running.values() if running.number == epoch), None)

    def _traces(self, epoch: int) -> Traces | None:
        return self._passed_by.get(epoch) or self._job.known_traces(epoch)

    async def _receipt_of(self, answered: Answered, traces: Traces) -> EpochReceipt:
        share = self._job.share
        return await asyncio.to_thread(receipt_of, *answered, share.first_sample, share.end_sample, traces)
