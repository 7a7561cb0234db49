"""Which life of a rank a process belongs to, and whom it may take a rank over from."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.client.leaving import leaves
from torch.utils.data import DataLoader, IterableDataset

from refill.pods.own_life import leaves_the_rank_to, own_life


class MadeInWorkers(IterableDataset[str]):
    """As one that makes its dataset object where it is asked for samples."""

    def __iter__(self) -> Iterator[str]:
        yield own_life(made_in=os.getpid()).encode()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.variant)])
def test_workers_that_make_their_own_dataset_are_of_their_parents_life(method: str) -> None:
    loader: DataLoader[str] = DataLoader(
        MadeInWorkers(), batch_size=None, num_workers=1, multiprocessing_context=method
    )
    assert list(loader) == [own_life(os.getpid()).encode()]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("made_here", [True, False])
def test_a_process_leaves_the_rank_to_one_that_it_started(method: str, made_here: bool) -> None:
    context: Any = multiprocessing.get_context(method)
    here = own_life(os.getpid())
    lives = {
        here: True,
        dataclasses.replace(here, started=here.started + 1): False,
        dataclasses.replace(here, place="c0ffee"): False,
        dataclasses.replace(here, place=""): False,
        dataclasses.replace(here, process=os.getppid()): False,
    }
    for life, is_left in lives.items() if method == "fork" else [(here, True)]:
        answers = context.Queue()
        process = context.Process(target=leaves, args=(answers, life, os.getpid() if made_here else None))
        process.start()
        assert answers.get() is is_left
        process.join()


def test_it_leaves_the_rank_to_no_helper_of_its_own_and_not_to_itself() -> None:
    context = multiprocessing.get_context("fork")
    answers, here = context.Queue(), own_life(os.getpid())
    helper = context.Process(target=leaves, args=(answers, here, os.getpid()), daemon=True)
    helper.start()
    assert answers.get() is False
    helper.join()
    assert not leaves_the_rank_to(here, os.getpid())


def test_a_process_that_started_this_one_by_a_command_leaves_it_nothing() -> None:
    """A program of its own that calls itself the same is a twin."""
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    parent = dataclasses.replace(own_life(os.getpid()), process=os.getppid(), started=int(fields[19]))
    assert not leaves_the_rank_to(parent, os.getpid())
