"""How do documents of varying length become sequences of one length? By a function of their order and their lengths.

All ranks know the epoch's order of a mixture, and how many tokens each of its documents has. So each can say which
documents are in which sequence (``protocol/packing.py``), and asks for those of its own. The place of a whole job is
one number, that of the next sequence, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.utils.data
from numpy.typing import ArrayLike

from refill.errors import InvalidInput
from refill.iterable_dataset import CacheIterableDataset, came_to_its_end, warn_if_again
from refill.loops.epoch_place import Iteration
from refill.loops.given_counts import is_whole
from refill.loops.loader_turns import batch_of_next
from refill.loops.shared_blocks import share_again, shared_zeros
from refill.loops.trainer_division import check_whole
from refill.mixture import Mixture
from refill.protocol.dealing import Dealing
from refill.protocol.keyed_hash import key_of
from refill.protocol.mixture_order import MemberPlace
from refill.protocol.packing import METHODS, PackedEpoch, packed_epoch
from refill.protocol.wire_format import Int64Array

__all__ = ["PackedSequences"]

_PACKING_VERSION = 1


class PackedSequences(CacheIterableDataset):
    """Documents packed into sequences of one length: docs/LANGUAGE_MODELS.md.

        mixture = refill.Mixture("http://refill:8000", {"web": "s3://b/web"}, job="run-1")
        packed = refill.PackedSequences(mixture, length=2048, batch_size=8)
        loader = refill.timed(DataLoader(packed, batch_size=8, num_workers=2), packed)

    A sequence is ``{"tokens": (length,), "segments": (length,), "positions": (length,)}``, int64: the tokens; which
    document of the sequence each is of, from 1 on, and 0 where it is not full; and its place in that document, as far
    as that is in this sequence. Attention within documents is where segments are equal.

    :param mixture: of documents; of one dataset, too.
    :param length: tokens of a sequence.
    :param batch_size: of the DataLoader; all ranks have the same.
    :param method: ``best_fit`` leaves documents whole that are no longer than a sequence; ``contiguous`` cuts where a
        sequence is full, and reads a document that was cut once for each part.
    :param window: so many documents in a row are packed together.
    :param pad: the token where a sequence is not full.
    :param tokens: the field of a sample that has its tokens, or a function that finds them.
    :param lengths: of each dataset by its name, tokens of each sample by id. None: the dataset's format says it, as
        Megatron's and files of tokens do.

    Where the mixture goes on without damaged documents (``on_damaged="skip"``), their places stay empty.

    The last step of an epoch is filled up with sequences from its beginning, or left out with ``drop_last``. Raises
    :class:`InvalidInput` for a sample that has not as many tokens as was said.
    """

    def __init__(
        self,
        mixture: Mixture,
        length: int,
        *,
        batch_size: int,
        method: str = "best_fit",
        window: int = 1024,
        pad: int = 0,
        tokens: str | Callable[[Any], Any] = "tokens",
        lengths: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        if not isinstance(mixture, Mixture):
            raise InvalidInput(
                f"PackedSequences reads a refill.Mixture, of one dataset, too, not a {type(mixture).__name__}"
            )
        for name, number in (("length", length), ("window", window)):
            if not is_whole(number) or number < 1:
                raise InvalidInput(f"{name} must be a whole number of at least 1, got {number!r:.50}")
        if method not in METHODS:
            raise InvalidInput(f"method must be {' or '.join(METHODS)}, got {method!r:.50}")
        if unknown := [name for name in lengths or {} if name not in mixture.names]:
            raise InvalidInput(f"lengths name {unknown[0]!r}, and the mixture has {', '.join(mixture.names)}")
        super().__init__(mixture, batch_size=batch_size)
        self.mixture = mixture
        self.length, self.method, self.window, self.pad = int(length), method, int(window), pad
        self._tokens_of: Callable[[Any], Any] = tokens if callable(tokens) else _Field(tokens)
        self._given = {name: np.asarray(each, dtype=np.int64) for name, each in (lengths or {}).items()}
        self._packed: tuple[tuple[int, list[MemberPlace]], PackedEpoch, Int64Array] | None = None
        """An epoch with where the datasets stand when it begins, and the lengths of its documents, in its order."""
        # Epoch, counted from 1, and the sequence from which on it is dealt: persistent workers must see a new one.
        self._dealt_from = shared_zeros(2)

    def packed(self, epoch: int) -> PackedEpoch:
        """What is in each sequence of an epoch: a few seconds of arithmetic for a million documents."""
        connection = self.mixture.connection
        at = epoch, connection.order(epoch)[1]
        if self._packed is None or self._packed[0] != at:
            lengths = connection.in_order(epoch, self._lengths())
            key = key_of("refill packing", _PACKING_VERSION, connection.spec.seed, epoch)
            self._packed = at, packed_epoch(lengths, self.length, self.method, self.window, key), lengths
        return self._packed[1]

    def fill_rate(self, epoch: int) -> float:
        """Tokens of documents, over all that the sequences of an epoch have room for."""
        found = self.packed(epoch)
        return int(found.lengths.sum()) / max(1, found.num_sequences * self.length)

    @property
    def iteration(self) -> Iteration:
        """The running iteration, or else the next."""
        if self._iteration is None:
            self._iteration = self._next_iteration()
        return self._iteration

    def _next_iteration(self) -> Iteration:
        """As it was said last, by any process: a persistent worker has made another one before."""
        epoch, start, _ = self._shared_place.tolist()
        return Iteration(epoch, start, self._dealt(epoch).per_rank)

    def __len__(self) -> int:
        """Sequences of this rank in the next epoch."""
        return self._dealt(int(self._shared_place[0])).per_rank

    def state_of(self, iteration: Iteration, position: int) -> dict[str, Any]:
        dealing = self._dealt(iteration.epoch)
        at_end = position == iteration.length
        if dealing.num_ranks > 1 and position % self.batch_size and not at_end:
            raise InvalidInput(
                f"a state of PackedSequences is taken between batches of {self.batch_size}, and the loop has had "
                f"{position} sequences: ranks would go on from other ones than they have left"
            )
        kept = {"packed": self._about(), "sequence": dealing.start + position * dealing.num_ranks}
        return self.mixture.state_at(iteration.epoch, int(at_end), int(at_end), kept)

    def load_state_dict(self, state: Any) -> None:
        """Go on where a loop stood, with any number of ranks and workers: all load a state of the same step, between
        batches. Errors as :meth:`CacheDataset.checked_state`."""
        found = self.dataset.checked_state(state)
        kept = found.sampler if isinstance(found.sampler, dict) else {}
        if "packed" not in kept or type(sequence := kept.get("sequence")) is not int:
            raise InvalidInput("the state is of no PackedSequences")
        if found.position:
            self._dealt_from[0] = 0  # a state within an epoch may have been loaded before
            self._place.resume(Iteration(found.epoch, 1, 1))
        else:
            if kept["packed"] != self._about():
                raise InvalidInput(
                    f"the state is of sequences packed as {kept['packed']}, and these are as {self._about()}: within "
                    "an epoch that stays as it was"
                )
            packed = self.packed(found.epoch)
            if not 0 <= sequence <= packed.num_sequences:
                raise InvalidInput(f"the state is damaged: epoch {found.epoch} has no sequence {sequence}")
            self.dataset.asks_in_batches(self.batch_size)  # what was had is reported as of that dealing
            self.mixture.connection.goes_on_with(found.epoch, *packed.had_before(sequence))
            self._dealt_from[1], self._dealt_from[0] = sequence, found.epoch + 1
            self._place.resume(Iteration(found.epoch, 0, self._dealt(found.epoch).per_rank))
        self._ahead_of_loader = None
        self._publish()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        share_again(self._dealt_from)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        check_whole(type(self).__name__, self.mixture)
        epoch, start = self.begins_at()
        iteration, worker = Iteration(epoch, start, self._dealt(epoch).per_rank), torch.utils.data.get_worker_info()
        dealt = _DealtSequences(self, iteration, self._shared_place)
        if worker is not None:
            dealt.check_begun = self._begun.by(worker, epoch, start)
        return dealt

    def read(self, epoch: int, places: Int64Array) -> Iterator[dict[str, torch.Tensor]]:
        """The sequences at these places ``(n,)`` of this rank. Called by what deals them to loader workers."""
        packed = self.packed(epoch)
        assert self._packed is not None
        sequences = self._dealt(epoch).positions(self.mixture.connection.group, places) % packed.num_sequences
        return self._read(epoch, packed, self._packed[2], sequences.tolist())

    def _read(
        self, epoch: int, packed: PackedEpoch, lengths: Int64Array, sequences: list[int]
    ) -> Iterator[dict[str, torch.Tensor]]:
        pieces = [packed.pieces(sequence) for sequence in sequences]
        wanted = np.unique(np.concatenate([packed.positions[each.start : each.stop] for each in pieces]))
        documents = self.mixture.samples_at(epoch, wanted)
        for of_sequence in pieces:
            tokens = np.full(self.length, self.pad, dtype=np.int64)
            segments, positions = np.zeros((2, self.length), dtype=np.int64)
            at = 0
            for segment, piece in enumerate(of_sequence, 1):
                offset, size = int(packed.offsets[piece]), int(packed.lengths[piece])
                sample = documents.get(int(packed.positions[piece]))
                if sample is None:  # it is damaged
                    at += size
                    continue
                document = np.asarray(self._tokens_of(sample))
                if len(document) != (said := int(lengths[packed.positions[piece]])):  # what is more would never come
                    raise InvalidInput(
                        f"sample {sample['__id__']} of dataset {sample['__dataset__']} has {len(document):,} tokens, "
                        f"and lengths say {said:,}: give lengths of what tokens= finds, or have it cut documents"
                    )
                tokens[at : at + size], segments[at : at + size] = document[offset : offset + size], segment
                positions[at : at + size] = np.arange(size)
                at += size
            yield {
                "tokens": torch.from_numpy(tokens),
                "segments": torch.from_numpy(segments),
                "positions": torch.from_numpy(positions),
            }

    def _dealt(self, epoch: int) -> Dealing:
        spec = self.mixture.connection.spec
        start = int(self._dealt_from[1]) if int(self._dealt_from[0]) == epoch + 1 else 0
        count = self.packed(epoch).num_sequences
        return Dealing(count, spec.num_groups, self.batch_size, start, drop_last=spec.drop_last)

    def _about(self) -> dict[str, Any]:
        return {
            "version": _PACKING_VERSION,
            "length": self.length,
            "method": self.method,
            "window": self.window if self.method == "best_fit" else 0,
        }

    def _lengths(self) -> list[Int64Array]:
        """Of each dataset, tokens of each sample by id."""
        connection = self.mixture.connection
        found = []
        for name, member, size in zip(connection.names, connection.members, connection.sizes, strict=True):
            if name in self._given:
                lengths = self._given[name]
            else:
                about = member.info().get("metadata", {}).get("format")
                if not isinstance(about, dict) or "dtype" not in about:
                    raise InvalidInput(
                        f"the format of dataset {name} does not say how many tokens a sample has: give "
                        f"lengths={{{name!r}: tokens of each sample by id}}"
                    )
                lengths = member.lengths(size) // np.dtype(str(about["dtype"])).itemsize
            if lengths.shape != (size,):
                raise InvalidInput(f"lengths of {name} has shape {lengths.shape}, and the dataset has {size} samples")
            found.append(lengths)
        return found


class _DealtSequences(Iterator[dict[str, torch.Tensor]]):
    """What one worker is dealt of an iteration. torchdata's StatefulDataLoader keeps the state of each worker."""

    def __init__(self, packed: PackedSequences, iteration: Iteration, place: torch.Tensor) -> None:
        """:param place: that all workers and the loop share, as of :class:`CacheIterableDataset`."""
        worker = torch.utils.data.get_worker_info()
        self._packed = packed
        self._number, self._workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self._about = {
            "workers": self._workers,
            "batch_size": packed.batch_size,
            "ranks": packed.mixture.connection.spec.num_groups,
        }
        self._iteration, self._place = iteration, place
        self._yielded = 0
        self._fetched: Iterator[dict[str, torch.Tensor]] = iter(())
        self.check_begun: Callable[[], None] | None = None
        """As of :class:`CacheIterableDataset`."""
        packed.dataset.asks_in_batches(packed.batch_size, 0 if worker is None else self._workers)

    def __next__(self) -> dict[str, torch.Tensor]:
        size = self._packed.batch_size
        if not self._yielded and self._number == 0 and self._packed.mixture.connection.spec.shuffle:
            warn_if_again(self._place, self._packed.dataset.job, "PackedSequences")
        if not self._yielded and self.check_begun is not None:
            self.check_begun()
        if not self._yielded and (of_loader := batch_of_next() or size) != size:
            raise InvalidInput(
                f"the DataLoader makes batches of {of_loader}, and PackedSequences deals {size} to a rank in a step: "
                "give both the same batch_size"
            )
        try:
            found = next(self._fetched, None) or self._first_of_next_batch()
        except Exception as error:
            if not isinstance(error, StopIteration):  # a loop that catches it would get it for ever
                self._yielded += size - self._yielded % size
                self._fetched = iter(())
                error.add_note(f"a loop that goes on does without this batch of epoch {self._iteration.epoch}")
            raise
        self._yielded += 1
        return found

    def _first_of_next_batch(self) -> dict[str, torch.Tensor]:
        iteration, size = self._iteration, self._packed.batch_size
        run, offset = divmod(self._yielded, size)
        first = iteration.start + (self._number + run * self._workers) * size
        places = np.arange(first + offset, min(first + size, iteration.length), dtype=np.int64)
        if not len(places):
            if self._number == 0:  # another worker may be at its end before this one begins
                came_to_its_end(self._place)
            raise StopIteration
        self._fetched = self._packed.read(iteration.epoch, places)
        return next(self._fetched)

    def state_dict(self) -> dict[str, Any]:
        began = self._packed.state_of(self._iteration, self._iteration.start)
        return began | self._about | {"yielded": self._yielded}

    def load_state_dict(self, state: Any) -> None:
        """Go on where this worker stood, of as many workers and ranks as there were."""
        if not isinstance(state, dict) or type(yielded := state.get("yielded")) is not int or yielded < 0:
            raise InvalidInput("the state is not that of a loader worker that reads PackedSequences")
        if (found := {name: state.get(name) for name in self._about}) != self._about:
            raise InvalidInput(
                f"the state is of a StatefulDataLoader with {found}, and needs them again, not {self._about}: that of "
                "refill.timed(loader, packed) works with any"
            )
        self._packed.load_state_dict(state)
        self._iteration, self._yielded, self._fetched = self._packed.iteration, yielded, iter(())


class _Field:
    """Takes the tokens out of a sample, by the name of their field. Picklable."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, sample: Any) -> Any:
        if self._name not in sample:
            raise InvalidInput(
                f"sample {sample.get('__id__')} has no field {self._name!r}: give tokens=, a name or a function"
            )
        return sample[self._name]
