"""Is what ranks got judged right? Without a cluster: what needs one is `make test-cluster`."""

from __future__ import annotations

import numpy as np
import pytest
from tests.cluster.ranks import not_once


@pytest.mark.parametrize(
    ("samples", "ids", "wrong"),
    [
        (4, [[0, 2], [3, 1]], ""),
        (5, [[0, 2, 4], [3, 1, 1]], ""),
        (5, [[0, 2, 4], [3, 3, 1]], ""),
        (4, [[0, 2], [3, 2]], "1 missing, 1 twice"),
        (4, [[0, 2], [3]], "1 missing, 0 twice"),
        (4, [[0, 2, 1], [3, 1]], "0 missing, 1 twice"),
        (5, [[0, 2, 4], [3, 1]], ""),
        (4, [[0, 2], [3, 9]], "1 missing, 0 twice"),
    ],
)
def test_each_sample_is_to_come_once(samples: int, ids: list[list[int]], wrong: str) -> None:
    assert not_once(samples, [np.array(each) for each in ids]) == wrong
