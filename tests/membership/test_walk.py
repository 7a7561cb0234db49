"""How many files does a batch enter? Whoever adds one on its way raises the number here, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.membership.pods_in_process import Packed
from tests.membership.walk import walk_of_a_batch, walk_of_a_batch_at_once


@pytest.mark.parametrize(("is_direct", "most_client", "most_pods"), [(True, 19, 36), (False, 17, 40)])
def test_a_batch_enters_few_files(
    packed: Packed, tmp_path: Path, is_direct: bool, most_client: int, most_pods: int
) -> None:
    of_rank, of_pods = walk_of_a_batch(packed[0], tmp_path, is_direct=is_direct)
    client, pods = of_rank.files("client"), of_pods.files("pods")
    assert 5 < len(client) <= most_client, client
    assert 20 < len(pods) <= most_pods, pods


def test_what_is_in_memory_is_answered_by_few_files_of_the_pod(packed: Packed) -> None:
    pods = walk_of_a_batch_at_once(packed[0]).files("pods")
    assert 10 < len(pods) <= 23, pods
