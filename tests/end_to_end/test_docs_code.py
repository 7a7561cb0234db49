"""The Python lines of README and docs run as they stand, on real pods: only places and lengths are others."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.end_to_end.doc_pages import PAGES, blocks
from tests.pod_fixtures import NUM_SAMPLES

import refill
from refill_service.demo.local_cluster import LocalCluster

BLOCKS = [
    pytest.param(text, id=f"{page.name}-{number}")
    for page in PAGES
    for number, text in enumerate(blocks(page, "python"))
    if "refill.Cache" in text and not text.startswith("class ")  # a trainer's, whom the tests of trainers run
]


@pytest.mark.parametrize("text", BLOCKS)
def test_they_run(
    three_pods: LocalCluster,
    job: dict[str, Any],
    packed: tuple[str, dict[str, bytes]],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = three_pods.pod_urls[0]
    dataset = f'"{url}", dataset="{packed[0]}", job="{job["name"]}"'
    for shown, here in (
        (r'"http://refill:8000", dataset="s3://bucket/images", job="run-1"', dataset),
        (r"(Cache\w+)\(\.\.\.", rf"\1({dataset}"),
        (r"\b90\b", "1"),
        (r"\b1000\b", "3"),
        (r"\b999\b", "2"),
        (r"num_workers=4", "num_workers=1"),
    ):
        text = re.sub(shown, here, text)
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(1, 1)
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "train": lambda *given: torch.rand(len(given[-1]["__id__"])),
        "weights": torch.ones(NUM_SAMPLES),
        "epoch": 0,
    }
    if "import refill" not in text:  # lines to go on with after some that have them
        names |= {"refill": refill, "torch": torch, "os": os}
    exec(compile(text, "the docs", "exec"), names)
    assert len(names["dataset"]) == NUM_SAMPLES
    if "in loader" in text or "in refill.timed" in text:
        counts = names["dataset"].epoch_counts(0)["total"]
        if "ImportanceSampler" in text:
            assert counts["takes"] + counts["repeats"] == NUM_SAMPLES, "the loop had every position once"
        else:
            assert counts["takes"] == NUM_SAMPLES, "the loop had every sample once"
