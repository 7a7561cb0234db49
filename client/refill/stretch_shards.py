"""How does Hugging Face ``datasets`` stream a planned epoch? Each stretch of positions is one of its shards.

``datasets`` deals shards to loader workers, and saves which shard comes next and how much of it was had. So workers
read stretches in turn, and a stream goes on within one of them, of which no more than that stretch is read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refill.errors import InvalidInput
from refill.loops.given_counts import is_whole
from refill.loops.trainer_division import check_whole
from refill.torch_dataset import CacheDataset

__all__ = ["huggingface_stream"]


def huggingface_stream(dataset: CacheDataset, *, epochs: int = 1, stretch: int = 64) -> Any:
    """A ``datasets.IterableDataset`` of a rank's epochs, as ``load_dataset(..., streaming=True)`` gives one, with
    ``state_dict``, ``select_columns``, ``with_format``, ``map``: docs/trainers/huggingface.md.

        stream = refill.huggingface_stream(refill.CacheDataset(..., decode=True), epochs=3).with_format("torch")
        loader = StatefulDataLoader(stream, batch_size=64, num_workers=2)

    The order is random already, and divided among ranks: no ``shuffle`` and no ``split_dataset_by_node`` behind it.

    :param dataset: or a :class:`Mixture`.
    :param epochs: so many, one after another. Iterated again it gives the same once more: name all that are wanted.
    :param stretch: how many positions in a row one request gets. The same for all ranks, and after a restart.
    """
    for name, value in (("epochs", epochs), ("stretch", stretch)):
        if not is_whole(value) or value < 1:
            raise InvalidInput(f"{name} must be a whole number of at least 1, got {value!r:.50}")
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise InvalidInput("huggingface_stream needs datasets: pip install 'refill-cache[huggingface]'") from error
    dataset.configure(order="keyed")
    dataset.asks_in_batches(stretch)
    starts = [(epoch, start) for epoch in range(epochs) for start in range(0, dataset.samples_per_rank, stretch)]
    return datasets.IterableDataset.from_generator(_Stretches(dataset, stretch), gen_kwargs={"starts": starts})


class _Stretches:
    """Makes samples of the stretches that a loader worker is given."""

    def __init__(self, dataset: CacheDataset, stretch: int) -> None:
        self._dataset, self._stretch = dataset, stretch

    def __call__(self, starts: list[tuple[int, int]]) -> Iterator[Any]:
        check_whole("huggingface_stream", self._dataset)
        for epoch, start in starts:
            end = min(start + self._stretch, self._dataset.samples_per_rank)
            yield from self._dataset.samples_of(epoch, np.arange(start, end, dtype=np.int64), as_many=True)
