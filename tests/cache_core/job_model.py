"""A job on its pods over several epochs, and what must hold of it: checked by what its ranks have received, with no
word of the pods believed."""

from __future__ import annotations

from collections import Counter

import numpy as np
from tests.cache_core.membership_model import PATIENCE_SECONDS
from tests.cache_core.pod_model import Int64s, Process, Shape
from tests.cache_core.requests_model import RequestsModel

from refill.errors import (
    JobLost,
    RefillError,
)
from refill.protocol.records import Kind, Record
from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.job_state import JobState
from refill_service.cache_core.receipt import EpochReceipt, sum_of_receipts


class JobModel(RequestsModel):
    """A job on its pods, and all that its ranks have received."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.num_receipts = 0
        """That were held against what came."""
        self.first_traces = [self.traces(epoch) for epoch in range(shape.num_epochs)]
        """What positions of each epoch asked for, before it moved."""

    def traces(self, epoch: int) -> Traces:
        job = JobState(self.spec, self.layout, ordinal=0, num_pods=1, incarnation="x")
        traces = job.known_traces(epoch)
        assert traces is not None
        return traces

    def length(self, epoch: int, rank: int) -> int:
        return self.first_traces[epoch].length(rank)

    def missing(self, epoch: int, rank: int) -> Int64s:
        had = self.got[epoch]
        return np.array([p for p in range(self.length(epoch, rank)) if (rank, p) not in had], dtype=np.int64)

    def all_recover(self) -> None:
        """Everybody is there, and reports."""
        for place in self.places:
            place.up = True
        for turn in range(60):
            for place in self.places[turn % len(self.places) :] + self.places[: turn % len(self.places)]:
                self.recovery_round(place.ordinal)
                if self.lost:
                    return
                for process in self.processes:
                    if process.rank % len(self.places) == place.ordinal:
                        self._asks_whether_known(process)
            homes = {process.rank % len(self.places) for process in self.processes}
            if all(self.places[home].pod is not None for home in homes) and not any(
                pod.life.recovering for pod in self.running
            ):
                return
            self.now += 0.25 if turn < 20 else 3 if turn < 50 else PATIENCE_SECONDS
        raise AssertionError(f"pods never recover: {[(pod.job.ordinal, pod.life.waits_for) for pod in self.running]}")

    def _asks_whether_known(self, process: Process) -> None:
        try:
            self._home_of(process, silent=False)
        except JobLost as error:
            self.refused_for_good(error)
        except RefillError:
            pass

    def process_is_killed(self, rank: int, position: int) -> None:
        """Another one goes on in its place from a checkpoint here, and knows nothing of what came before."""
        self.killed.add(rank)
        epoch, incarnation = self.epochs[rank], self.processes[rank].incarnation
        self.processes[rank] = Process(rank, incarnation, since=epoch + 1 if position else 0)
        for key in [key for key in self.got[epoch] if key[0] == rank and key[1] >= position]:
            del self.got[epoch][key]

    def observed(self, rank: int) -> None:
        """A process that has received nothing as this rank says so to its home, and nothing else."""
        pod = self.places[rank % len(self.places)].pod
        if pod is not None and not pod.record.is_reported(rank):
            report = pod.record.report_of(rank)
            report.add(Record(Kind.UNUSED, 0, rank))
            report.ended()

    def looks_after_home(self, rank: int) -> None:
        """As ``JobPods.look_after_home``: it hears what is unknown."""
        process = self.processes[rank]
        try:
            pod = self._home_of(process, silent=False)
        except RefillError:
            return
        process.since = max(process.since, pod.records.unknown_before().get(rank, 0))

    def check(self) -> None:
        for pod in self.running:
            memory = pod.home.remote_memory
            assert memory.used + memory.granted <= memory.capacity, "remote memory above its limit"
        self.note_unknown()
        for epoch, got in enumerate(self.ever_got):
            if self.anything_unknown(epoch):
                continue
            may_come = self.multiplicity(epoch)
            came = Counter(got.values())
            twice = [sample for sample, count in came.items() if count > may_come[sample]]
            assert not twice, f"epoch {epoch}: samples {twice} came more often than they were asked for"

    def multiplicity(self, epoch: int) -> Counter[int]:
        """How often each sample may come: once, and as often as positions repeat it."""
        traces = self.first_traces[epoch]
        members = traces.members(0, self.layout.num_samples)
        found = Counter(range(self.layout.num_samples) if members is None else np.flatnonzero(members).tolist())
        for rank in range(self.spec.world_size):
            asked, repeats = traces.asked(rank, np.arange(traces.length(rank)))
            found.update(asked[repeats].tolist())
        return found

    def received_by_rank(self, epoch: int) -> dict[int, int]:
        """How many samples each rank has received, without repeats."""
        traces, found = self.first_traces[epoch], Counter[int]()
        for rank in range(self.spec.world_size):
            _, repeats = traces.asked(rank, np.arange(traces.length(rank)))
            found[rank] = int(np.count_nonzero(~repeats))
        return {rank: count for rank, count in found.items() if count}

    def receipt(self, epoch: int) -> EpochReceipt | None:
        """As ``JobAtPod.receipt``; None where a pod does not know any more."""
        parts = [pod.receipt(epoch) for pod in self.running]
        total = sum_of_receipts([part for part in parts if part is not None])
        unknown_ranks = {rank for pod in self.running for rank in pod.life.unknown.ranks(epoch)}
        for pod in self.running:
            total = total.without(pod.home.unused_ahead(epoch), unknown_ranks)
        return None if None in parts or len(parts) < len(self.places) else total

    def finish_epoch(self, epoch: int) -> None:
        """All ranks ask for what they lack of an epoch; nothing is lost any more. Then the receipt is held against what
        came."""
        for _ in range(60):
            self.all_recover()
            if self.lost:
                return
            lacks = {rank: self.missing(self.epochs[rank], rank) for rank in range(self.spec.world_size)}
            if not any(len(lacks[rank]) for rank in lacks if self.epochs[rank] == epoch):
                break
            for (
                rank,
                positions,
            ) in lacks.items():  # of those that are ahead, too: pods may have forgotten where they are
                if len(positions):
                    self.ask(rank, positions)
                    self.deliver_all()
            self.all_reads_end()
        else:
            raise AssertionError(f"epoch {epoch} does not end")
        self.check()

    def check_epoch(self, epoch: int) -> None:
        """An epoch that all ranks have asked for to its end, against its receipt."""
        came = Counter(self.got[epoch].values())
        twice = (came - self.multiplicity(epoch)).total()
        if not self.anything_unknown(epoch):
            assert not twice, f"epoch {epoch}: {twice} samples came more often than they were asked for"
        if (receipt := self.receipt(epoch)) is None:
            return
        self.num_receipts += 1
        assert receipt.missing == 0, f"epoch {epoch}: nothing is missing, and its receipt says {receipt}"
        assert receipt.duplicates + receipt.unknown >= twice, f"epoch {epoch}: {twice} came twice, and {receipt}"
        if epoch + 1 not in self.known_from.values():  # else it may be that no pod knew that a rank had come to it
            twice = (Counter(self.ever_got[epoch].values()) - self.multiplicity(epoch)).total()
            assert not (twice and receipt.exact), (
                f"epoch {epoch}: killed processes, too, had {twice} twice, and {receipt}"
            )
        if not self.anything_unknown(epoch):
            assert receipt.exact, f"epoch {epoch} was exact, and its receipt says {receipt}"
            expected = self.received_by_rank(epoch)
            if any(epoch in pod.job.traced_epochs for pod in self.running):  # who repeats may have changed
                assert sum(receipt.ranks.values()) == sum(expected.values()), f"epoch {epoch}: {receipt}"
            else:
                assert receipt.ranks == expected, f"epoch {epoch}: {receipt}"
