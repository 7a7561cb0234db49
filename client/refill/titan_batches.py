"""How do packed sequences come to torchtitan's loop? As batches of inputs and labels, without end, with one state.

torchtitan asks its dataloader for ``(dict of inputs, labels)`` on and on, whatever epochs are, and saves it by
``state_dict`` and ``load_state_dict`` with ``torch.distributed.checkpoint``. Its own loader keeps a state for each
rank, and refuses one of another number of ranks. Here all ranks have the same state, and any number goes on from it.
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

__all__ = ["TitanBatches"]

_STATE = "refill"
_IGNORED = -100
"""As torch's cross entropy has it."""


class TitanBatches:
    """A dataloader for torchtitan: docs/trainers/torchtitan.md. Iterate it once.

    A batch is ``({"input": (batch, n), "positions": (batch, n), "segments": (batch, n)}, labels (batch, n))``, int64,
    of sequences of ``n + 1`` tokens. A label is the token behind; -100 where that is of another document, or padding.

    :param packed: with ``length`` one more than torchtitan's ``seq_len``, and its ``local_batch_size``. Every rank
        reads it, those that share batches by ``batch_group`` of its mixture.
    :param loader: arguments of DataLoader, such as ``num_workers``.
    """

    def __init__(self, packed: PackedSequences, **loader: Any) -> None:
        self._packed = packed
        self._loop = timed(torch.utils.data.DataLoader(packed, batch_size=packed.batch_size, **loader), packed)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            epoch = self._packed.epoch
            for batch in self._loop:
                tokens, segments = batch["tokens"], batch["segments"]
                is_next = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
                labels = torch.where(is_next, tokens[:, 1:], _IGNORED)
                given = {"input": tokens, "positions": batch["positions"], "segments": segments}
                yield {name: each[:, :-1].contiguous() for name, each in given.items()}, labels
            self._packed.set_epoch(epoch + 1)

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
                f"the state is not of TitanBatches: it has {', '.join(map(str, state))[:100]}"
            ) from error
        self._loop.load_state_dict(found)
