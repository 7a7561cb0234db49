"""How do packed sequences come to the loops of torchtitan and Megatron? As batches with labels, without end, with one
state.

Both ask a loader for batch after batch, whatever epochs are. Their own loaders keep a state for each data parallel
rank, or none but a count of samples. Here all ranks have the same state, and any number goes on from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.data

from refill.data_wait import timed
from refill.errors import InvalidInput
from refill.packed_sequences import PackedSequences

__all__ = ["MegatronBatches", "TitanBatches"]

_STATE = "refill"
_IGNORED = -100
"""As torch's cross entropy has it."""


class _TokenBatches:
    """Batches of packed sequences, made into tokens and the labels behind them."""

    def __init__(self, packed: PackedSequences, **loader: Any) -> None:
        self._packed = packed
        self._loop = timed(torch.utils.data.DataLoader(packed, batch_size=packed.batch_size, **loader), packed)

    def _batches(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """``tokens``, ``positions`` and ``segments`` of all tokens that have one behind them, and those labels."""
        num_empty = 0
        while num_empty < 2:  # what a state leaves of its epoch may be too little for a batch
            epoch = self._packed.epoch
            num_empty += 1
            for batch in self._loop:
                num_empty = 0
                tokens, segments = batch["tokens"], batch["segments"]
                is_next = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
                labels = torch.where(is_next, tokens[:, 1:], _IGNORED)
                yield {name: each[:, :-1].contiguous() for name, each in batch.items()}, labels
            self._packed.set_epoch(epoch + 1)
        raise InvalidInput(
            f"an epoch has {len(self._packed)} sequences for a rank, which make no batch of {self._packed.batch_size}: "
            "take a smaller batch_size, or leave drop_last out"
        )

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks, so that one of them is kept. As text, which checkpoints don't take apart."""
        return {_STATE: json.dumps(self._loop.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a loop stood, on any number of ranks. An empty state is that of a run that begins. Raises
        :class:`InvalidInput` for one that is none of ours."""
        if not state:
            return
        try:
            found = json.loads(state[_STATE])
        except (LookupError, TypeError, ValueError) as error:
            raise InvalidInput(
                f"the state is not of {type(self).__name__}: it has {', '.join(map(str, state))[:100]}"
            ) from error
        self._loop.load_state_dict(found)


class TitanBatches(_TokenBatches):
    """A dataloader for torchtitan: docs/trainers/torchtitan.md. Iterate it once.

    A batch is ``({"input": (batch, n), "positions": (batch, n), "segments": (batch, n)}, labels (batch, n))``, int64,
    of sequences of ``n + 1`` tokens. A label is the token behind; -100 where that is of another document, or padding.

    :param packed: with ``length`` one more than torchtitan's ``seq_len``, and its ``local_batch_size``. Every rank
        reads it, those that share batches by ``batch_group`` of its mixture.
    :param loader: arguments of DataLoader, such as ``num_workers``.
    """

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch, labels in self._batches():
            batch["input"] = batch.pop("tokens")
            yield batch, labels


class MegatronBatches(_TokenBatches):
    """An iterator for Megatron's ``--dataloader-type external``: docs/trainers/torchtitan.md#megatron.

    A batch is what its ``get_batch_on_this_tp_rank`` looks for: ``tokens``, ``labels`` and ``position_ids``, ``(batch,
    n)`` int64, and ``loss_mask``, ``(batch, n)`` float32, of sequences of ``n + 1`` tokens. A label is the token
    behind. Where that is of another document, or padding, the mask is 0, and the label, too.

    :param packed: with ``length`` one more than the sequences that Megatron is told of, and its micro batches.
    :param attention_mask: whether a batch has ``attention_mask`` as well, ``(batch, 1, n, n)`` bool: true where a token
        must not look, which is what comes later, or is of another document.
    :param loader: arguments of DataLoader, such as ``num_workers``.
    """

    def __init__(self, packed: PackedSequences, *, attention_mask: bool = False, **loader: Any) -> None:
        super().__init__(packed, **loader)
        self._has_mask = attention_mask
        self._coming = self._batches()

    def __iter__(self) -> MegatronBatches:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        batch, labels = next(self._coming)
        has_label = labels != _IGNORED
        found = {
            "tokens": batch["tokens"],
            "labels": labels * has_label,
            "loss_mask": has_label.float(),
            "position_ids": batch["positions"],
        }
        if self._has_mask:
            segments = batch["segments"]
            may_look = (segments[:, :, None] == segments[:, None, :]).tril()
            found["attention_mask"] = ~may_look[:, None]
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`TitanBatches.load_state_dict`."""
        super().load_state_dict(state)
        self._coming = self._batches()

    def save_state(self) -> dict[str, Any]:
        """:meth:`state_dict`, by the name by which Megatron asks for it (``--dataloader-save``)."""
        return self.state_dict()
