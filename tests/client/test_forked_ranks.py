"""Training processes that are forked from one that has made datasets, as by a notebook's launcher, make their own."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from refill.loops.shared_blocks import share_again, shared_zeros

MAKE = "refill.CacheDataset('http://127.0.0.1:1', dataset='file:///d', job='j')"
FORKS = f"""
import os, signal, refill
dataset = {MAKE}
if (child := os.fork()) == 0:
    signal.alarm(20)
    {MAKE}
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_makes_a_dataset_of_its_own_where_its_parent_has_one() -> None:
    """torch's threads are not there in a process that is forked, which would wait for them for ever."""
    threads = os.environ | {"OMP_NUM_THREADS": "4"}
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, env=threads, check=True)
    assert done.stdout.strip() == "0", f"the forked process hung: {done.stderr}"


@pytest.mark.parametrize("shape", [3, (3, 4), (3, 65536), 0])
def test_blocks_are_zeros_that_processes_share(shape: int | tuple[int, ...]) -> None:
    block = shared_zeros(shape)
    assert block.is_shared()
    assert block.is_contiguous()
    assert torch.equal(block, torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_are_shared_again_with_what_they_hold(copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
    block = shared_zeros((2, 3))
    block[1, 2] = 7
    found = copied(block)
    assert not found.is_shared()
    share_again(found)
    assert found.is_shared()
    assert found.tolist() == block.tolist() == [[0, 0, 0], [0, 0, 7]]
    if (child := os.fork()) == 0:
        found[0, 0] = 9
        os._exit(0)
    os.waitpid(child, 0)
    assert found[0, 0] == 9
    assert block[0, 0] == 0
