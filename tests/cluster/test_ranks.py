"""Is what ranks got followed and judged right? Without a cluster: what needs one is `make test-cluster`."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cluster.cluster import Failed
from tests.cluster.ranks import Ranks, not_once
from tests.waiting import until


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


class _Cluster:
    """Of which nothing is true but that ranks run.

    :param fails: a command of kubectl.
    """

    namespace = "ml"
    image = "refill", "Always"

    def __init__(self, fails: str = "") -> None:
        self.fails, self.asked = fails, list[str]()

    def apply(self, *objects: dict[str, Any]) -> None:
        self.asked.append("apply")

    def kubectl(self, *arguments: str, **how: Any) -> str:
        self.asked.append(arguments[0])
        if arguments[0] == self.fails:
            raise Failed("not within 180 s")
        return "Running"


def test_ranks_that_do_not_come_up_are_removed() -> None:
    cluster = _Cluster("wait")
    with pytest.raises(Failed, match="not within 180 s"):
        Ranks(cluster, "http://refill:8000", "s3://bucket/images", 0.1)  # type: ignore[arg-type]
    assert cluster.asked == ["delete", "apply", "wait", "delete"]


def test_a_line_that_was_broken_off_is_taken_when_it_comes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server goes away in the middle of it."""
    ids = [base64.b64encode(zlib.compress(np.array([first, 2], "<i4").tobytes())).decode() for first in range(2)]
    for rank in range(2):
        lines = f"0 batch 0 1.5 2\n1 epoch 0 4 {ids[rank]}\n"
        (tmp_path / f"refill-try-rank-{rank}").write_text(lines)
        (tmp_path / f"refill-try-rank-{rank}-first").write_text(lines[: lines.index("epoch") + 3])
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"""#!/bin/sh
for pod in "$@"; do :; done
cd {tmp_path}
if [ -e "$pod-first" ]; then cat "$pod-first"; rm "$pod-first"; else cat "$pod"; exec sleep 60; fi
""")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    ranks = Ranks(_Cluster(), "http://refill:8000", "s3://bucket/images", 0.1)  # type: ignore[arg-type]
    try:
        until(lambda: ranks.finished() == 1, "the line of the epoch")
    finally:
        ranks.end()
    assert ranks.wrong == {0: ""}
    assert [len(batches) for batches in ranks.batches] == [1, 1]
    assert ranks.said == []
