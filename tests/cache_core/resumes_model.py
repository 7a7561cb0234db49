"""All ranks of a job are killed, and another number of them goes on from a checkpoint: as ``membership/resuming.py``
does it, at pod 0. What is left of the epoch is held against what came before, with no word of the pods believed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tests.cache_core.job_model import JobModel
from tests.cache_core.pod_model import Int64s, Place, Pod, Process, Shape

from refill.errors import EpochEnded, JobLost, PodUnreachable, RefillError
from refill.protocol.incarnation import line_of, moves_of, same_line
from refill.protocol.records import Kind, RecordReader
from refill_service.cache_core.epoch_order import ExplicitTraces, Traces
from refill_service.cache_core.job_lifecycle import Begin
from refill_service.cache_core.resumed_epoch import (
    NOT_KNOWN_HERE,
    ResumedEpoch,
    consumed_at_pod,
    consumed_in_all,
    epoch_resumed,
    keyed_traces,
    resumed_incarnation,
)


class ResumesModel(JobModel):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.consumed: tuple[int, set[int]] = (-1, set())
        """The epoch that was resumed last, and all samples of it that do not come again."""

    def resume(self, num_ranks: int, thirds: int) -> None:
        """From a step that all ranks have come to. Of what they have had since, nothing counts."""
        if num_ranks == self.spec.world_size:
            return
        epoch, ranks = min(self.epochs), range(self.spec.world_size)
        missing = [self.missing(epoch, rank) for rank in ranks]
        reached = min(int(m[0]) if len(m) else self.length(epoch, r) for r, m in zip(ranks, missing, strict=True))
        position = reached * thirds // 3
        if position and position == self.length(epoch, 0):
            epoch, position = epoch + 1, 0
            if epoch == self.shape.num_epochs:
                return
        had = {sample for (_, at), sample in self.got[epoch].items() if at < position}
        if self.consumed[0] == epoch:
            had |= self.consumed[1]
        try:
            rest = self._rest(self.incarnation, epoch, position)
        except (EpochEnded, JobLost) as error:
            if self._anything_forgotten():
                self.lost = error.message
            else:
                self.refused_for_good(error)
            return
        except RefillError:
            return
        if rest is None:
            return
        if not self.anything_unknown(epoch) and not rest.unknown:
            assert set(rest.done.tolist()) == had, f"ranks had had {sorted(had)}, and pods take {rest.done} for that"
        if rest.unknown:
            assert self.anything_unknown(epoch) or self._anything_forgotten(), "nothing was lost, and pods miss it"
        self._begins(num_ranks, rest)

    def refused_for_good(self, error: RefillError) -> None:
        """Until all ranks have begun the epoch after the one that was resumed, at least one pod that knows how must be
        left, or a journal."""
        forgotten = "from which checkpoint" in error.message or "a trace of epoch" in error.message
        nobody_knows = all(place.resumed(self.incarnation) is None for place in self.places)
        have_left = {rank for later in self.got[self.consumed[0] + 1 :] for rank, _ in later}
        is_over = len(have_left) == self.spec.world_size
        if isinstance(error, JobLost) and forgotten and nobody_knows and not is_over:
            self.lost = error.message
        else:
            super().refused_for_good(error)

    def _anything_forgotten(self) -> bool:
        """Whether nobody may be left who knows all that pods had answered, as all ranks are gone: a pod is
        gone for good, or has lost its memory, and its journal is not whole; or it was unknown before."""
        ran_on = max(pods for name, pods in self.pods_of.items() if same_line(name, self.incarnation))
        if len(self.places) < ran_on or self.known_from:
            return True
        journals = [place.journal for place in self.places[:ran_on] if place.pod is None]
        return any(journal is None or not journal.whole for journal in journals)

    def _rest(self, line: str, epoch: int, position: int) -> ResumedEpoch | None:
        """None: nothing is left."""
        if not all(place.up for place in self.places):
            raise PodUnreachable("not all pods answer", pod=0)
        leader = self.places[0].pod
        if leader is not None and not leader.life.traces_are_final:
            raise leader.later("first it has to move")
        if position == 0 and epoch_resumed(line) != epoch:
            return ResumedEpoch(line, epoch, 0, np.empty(0, dtype=np.int64))
        answers = [self._consumed_at(place, line, epoch, position) for place in self.places]
        if (found := consumed_in_all(answers)) is None:
            raise JobLost("no pod knows any more what was delivered before")
        done, expected, requests = found
        if expected >= requests:
            return None
        return ResumedEpoch(line, epoch, position, done, max(0, expected - len(done)))

    def _consumed_at(self, place: Place, line: str, epoch: int, position: int) -> Int64s:
        """As ``Resuming.consumed``."""
        traces: Traces | None
        if place.pod is not None:
            job = place.pod.job
            assert line_of(job.incarnation) == line, "another job runs"
            if job.life.recovering:
                raise place.pod.later("it is recovering")
            job.check_traces(epoch)
            traces, answered = job.known_traces(epoch), place.pod.owner.answered(epoch)
            if traces is None or answered is None:
                raise EpochEnded("pods keep the running epoch and the one before")
            return consumed_at_pod(epoch, position, [answered], traces, self._ranks, job.resumed, job.life.moves)
        volume = place.volume
        if volume is None or line_of(volume.incarnation) != line:
            return NOT_KNOWN_HERE
        records = [*RecordReader(volume.files.get(epoch, b""))]
        if not records and not (volume.whole and all(each < epoch for each in volume.files)):
            raise EpochEnded("pods keep the running epoch and the one before")
        dealt = {each.rank: each.columns[0] for each in records if each.kind is Kind.TRACE}
        traces = keyed_traces(self.spec, epoch, self.layout.num_samples, volume.resumed)
        if len(dealt) == self._ranks:
            traces = ExplicitTraces(self.layout.num_samples, dealt)
        pairs = [(each.columns[0], each.columns[1]) for each in records if each.kind is Kind.ANSWERED]
        moves = moves_of(volume.incarnation)
        return consumed_at_pod(epoch, position, pairs, traces, self._ranks, volume.resumed, moves)

    @property
    def _ranks(self) -> int:
        return self.spec.world_size

    def _begins(self, num_ranks: int, rest: ResumedEpoch) -> None:
        epoch, num_pods = rest.epoch, len(self.places)
        self.incarnation = resumed_incarnation(rest.incarnation, epoch, rest.position, num_ranks, num_pods)
        self.spec = replace(self.spec, world_size=num_ranks)
        self.pods_of[self.incarnation] = num_pods
        self.consumed = epoch, {*rest.done.tolist()}
        self.known_from, self.killed = {}, set()
        self.asked, self.messages, self.responses = [], [], []
        self.processes = [Process(rank, self.incarnation) for rank in range(num_ranks)]
        self.epochs = [epoch] * num_ranks
        for each in range(self.shape.num_epochs):
            self.got[each], self.ever_got[each] = {}, {}
        for place in self.places:
            begin = Begin(self.incarnation, from_journal=False, ran_before=False)
            place.pod = Pod(self, place, begin, None, rest)
            place.pod.begin_journal()
        self.first_traces[epoch:] = [self.traces(each, rest) for each in range(epoch, self.shape.num_epochs)]
