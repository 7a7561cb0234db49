"""What a sampler sees of the loader that iterates it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.utils.data

from refill.loops.loader_turns import batch_of_loader, workers_of_loader


class Looks(torch.utils.data.Sampler[int]):
    seen: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[int]:
        self.seen = batch_of_loader(self), workers_of_loader()
        yield from range(6)


@pytest.mark.parametrize("workers", [0, 2])
def test_batch_and_workers_of_a_loader(workers: int) -> None:
    sampler = Looks()
    loader = torch.utils.data.DataLoader(list(range(6)), batch_size=3, sampler=sampler, num_workers=workers)
    assert [len(batch) for batch in loader] == [3, 3]
    assert sampler.seen == (3, workers)


def test_without_a_loader_nothing_is_seen() -> None:
    sampler = Looks()
    assert list(sampler) == list(range(6))
    assert sampler.seen == (0, 0)
