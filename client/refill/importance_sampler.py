"""Which samples does a rank train with when important ones are to come more often? SHADE's sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from refill.dataset_parts import dataset_alone
from refill.epoch_sampler import PlacedSampler
from refill.errors import InvalidInput, JobLost
from refill.gathered_scores import GatheredScores
from refill.loops.epoch_place import Iteration
from refill.pods.pod_connection import PodConnection
from refill.pods.resume_state import ResumeState
from refill.protocol.importance import order_of_rank
from refill.protocol.wire_format import Int64Array, check_samples
from refill.training_scores import TrainingScores

if TYPE_CHECKING:
    from refill.torch_dataset import CacheDataset

__all__ = ["ImportanceSampler"]


class ImportanceSampler(PlacedSampler):
    """Draws each epoch by how important training finds samples (SHADE, FAST '23): some come often, some not at all.

    Call :meth:`update` after each batch. At the start of an epoch all ranks draw from the scores that all of them have
    told, with replacement: ``len(dataset)`` draws, each sample as probable as its score is high, and each rank takes
    its share of them. What is in the pods' memory goes first. Pods keep the samples that are most important.

    The dataset's job gets ``policy="exact"`` with eviction ``importance``, and ``order="explicit"``. With
    ``policy="planned"``, given to the dataset, ranks gather scores by ``torch.distributed`` as an epoch begins, and
    pods read what was drawn ahead; nothing is in memory then that could go first.

    :param repetition: how often a draw that is in memory comes (the paper's repetition factor). With 1 nothing is
        repeated that was not drawn so often. More hits more, and trains with fewer different samples.

    ``improving`` may be set at any time before an epoch: see :meth:`validated`.
    """

    def __init__(self, dataset: CacheDataset, repetition: float = 1.0) -> None:
        if not 1 <= repetition < 1000:
            raise InvalidInput(f"repetition must be at least 1, got {repetition!r}")
        if dataset_alone("ImportanceSampler", dataset).policy == "planned":
            dataset.configure(order="explicit")
        else:
            _configure(dataset)
        dataset.register()
        super().__init__(dataset)
        self.repetition = repetition
        self.improving = False
        """True: each rank draws for itself and takes the draws that came most often; else ranks divide one drawing."""
        self._best: float | None = None
        self.drawn_from: tuple[NDArray[np.float32], NDArray[np.bool_]] | None = None
        """``(scores, cached)``, by sample: what the last epoch was drawn from, and what was in memory then."""
        connection, spec = dataset.connection, dataset.connection.spec
        self._num_parts = spec.num_groups
        self._part = self.rank
        if isinstance(connection, PodConnection):
            self._training = TrainingScores(connection, len(dataset))
        else:
            self._part = connection.group
            self._training = TrainingScores(GatheredScores(spec, self.rank, len(dataset)), len(dataset))

    def _num_positions(self) -> int:
        return -(-len(self.dataset) // self._num_parts)

    def update(self, sample_ids: Any, logits: Any = None, labels: Any = None, *, losses: Any = None) -> None:
        """Say what training found in a batch; returns at once.

        :param sample_ids: ``(batch,)`` its ``batch["__id__"]``.
        :param logits: ``(batch, classes)`` and ``labels`` ``(batch,)``: the loss of each sample is its cross entropy.
        :param losses: ``(batch,)`` in place of both: the loss of each sample, from any loss function without reduction.
        """
        if isinstance(sample_ids, torch.Tensor):
            sample_ids = sample_ids.cpu()
        ids = np.asarray(sample_ids, dtype=np.int64).reshape(-1)
        if (losses is None) == (logits is None) or (logits is None) != (labels is None):
            raise InvalidInput("update takes logits and labels, or losses")
        if losses is None:
            with torch.no_grad():
                losses = torch.nn.functional.cross_entropy(
                    torch.as_tensor(logits).detach().float(), torch.as_tensor(labels), reduction="none"
                )
        shape = tuple(np.shape(losses))
        if shape != (len(ids),):
            raise InvalidInput(f"a batch of {len(ids)} samples has losses of shape {shape}: give one for each sample")
        check_samples(ids, len(self.dataset))
        self._training.trained(ids, losses)

    def tell(self) -> None:
        """Tell the pods now what they are told a few times a second, and before an epoch is drawn."""
        self._training.report()

    def scores(self) -> NDArray[np.float32]:
        """``(len(dataset),)`` the score of each sample, as far as this rank knows: its own, and at the beginning of an
        epoch those of all ranks. NaN: not trained with yet."""
        return self._training.snapshot()[0]

    def validated(self, accuracy: float) -> None:
        """Say what a validation found, the more the better: ``improving`` is whether it is the best so far. While
        validation improves, SHADE trains with what is most important alone; call it on all ranks with the same value,
        or not at all."""
        self.improving = self._best is None or accuracy > self._best
        if self.improving:
            self._best = float(accuracy)

    def begin(self) -> Iteration:
        epoch, resumed = self.place.begin(shuffled=self.shuffle)
        if resumed is not None and resumed.start > 0:
            if self.list_of_state is not None:
                return self.asks_for(epoch, self.list_of_state, resumed.start)
            self.iteration = resumed  # the pods have what it drew
            return resumed
        return self.asks_for(epoch, self._drawn(epoch), 0)

    def _drawn(self, epoch: int) -> Int64Array:
        self.drawn_from = scores, cached = self._training.drawn_from(epoch)
        return order_of_rank(
            scores,
            cached,
            self._part,
            self._num_parts,
            seed=self.dataset.connection.spec.seed % 2**64,
            epoch=epoch,
            repetition=self.repetition,
            improving=self.improving,
        )

    def _known_length(self, epoch: int) -> int:
        return self._num_positions()

    def state_of(self, iteration: Iteration, position: int) -> dict[str, Any]:
        """The state at a position, with the scores of all samples."""
        scores, found = map(torch.from_numpy, self._training.snapshot())
        kept = {"scores": scores, "found": found, "improving": self.improving, "best": self._best}
        kept |= self.list_at(iteration, position)
        return self.dataset.state_at(iteration.epoch, position, iteration.length, kept)

    def resume(self, state: Any) -> ResumeState:
        try:
            found = super().resume(state)
        except JobLost:  # the epoch has to start over, and does so with what training knew
            self._restore(ResumeState.from_dict(state))
            raise
        if found.mid_epoch and found.rank != self.rank and self.dataset.connection.spec.is_listed:
            raise InvalidInput(
                f"the state is of rank {found.rank} in the midst of epoch {found.epoch}, whose draws are each rank's "
                f"own: give rank {self.rank} its own state, or go on from the end of an epoch"
            )
        self.load_list(found)
        self._restore(found)
        return found

    def _restore(self, found: ResumeState) -> None:
        kept = found.sampler if isinstance(found.sampler, dict) else {}
        scores = kept.get("scores")
        if not isinstance(scores, torch.Tensor) or tuple(scores.shape) != (len(self.dataset),):
            raise InvalidInput("the state has no scores of this dataset's samples: it is not of an ImportanceSampler")
        found_since = kept.get("found")
        if not isinstance(found_since, torch.Tensor) or found_since.shape != scores.shape:
            raise InvalidInput("the state is damaged: it does not say which scores its rank has found")
        self._training.restore(scores.numpy(), found_since.numpy().astype(bool))
        self.improving, self._best = bool(kept.get("improving")), kept.get("best")


def _configure(dataset: CacheDataset) -> None:
    given = dataset.policy_settings
    if given.get("eviction", "importance") != "importance":
        raise InvalidInput(
            f"policy_settings eviction={given['eviction']!r} contradicts ImportanceSampler: leave it out"
        )
    if given and "eviction" not in given:
        raise InvalidInput("policy_settings of an ImportanceSampler need eviction='importance', too")
    dataset.configure(order="explicit", policy="exact", policy_settings=given or {"eviction": "importance"})
