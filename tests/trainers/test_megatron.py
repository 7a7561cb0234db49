"""Megatron's groups and iterator over packed sequences: ranks that share a batch have the same, each document once."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest
from tests.trainers.launching import MEGATRON, NUM_SAMPLES, SCRIPTS, Place

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

SEQUENCES_OF_A_STEP = 8


@pytest.mark.variant
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.variant)])
def test_a_loop_goes_on_with_another_division_of_its_ranks(place: Place, tensor: int, pipeline: int) -> None:
    job = place.new_job()
    state = place.folder / f"{job}.pt"

    def had(*how: int) -> list[dict[str, Any]]:
        arguments = [*map(str, how), str(state)]
        script = SCRIPTS / "megatron_job.py"
        launched = place.launch(script, job, *arguments, processes=4, seconds=500, imported=MEGATRON)
        return launched.checked().lines

    first = had(tensor, pipeline, 6)
    by_data_rank = {rank: Counter(str(line["documents"]) for line in first if line["data"] == rank) for rank in (0, 1)}
    for rank, counts in by_data_rank.items():
        assert counts.total() == 2 * 6, f"data parallel rank {rank}"
        assert all(count % 2 == 0 for count in counts.values()), "two ranks share each batch"
    assert not set(by_data_rank[0]) & set(by_data_rank[1])
    rest = had(1, 1, 0)
    assert {line["data"] for line in rest} == {0, 1, 2, 3}
    seen = Counter(document for line in first if line["model"] == [0, 0] for document in line["documents"])
    seen.update(document for line in rest for document in line["documents"])
    assert set(seen) == set(range(NUM_SAMPLES))
    most = SEQUENCES_OF_A_STEP * 6  # of a sequence, with 5 tokens each
    assert seen.total() - NUM_SAMPLES <= most, "more than what fills up the last step came again"
