"""The Python lines of README and docs run as they stand, on real pods: only places and lengths are others. And what
`refill analyze` prints is what the pages show."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests.end_to_end.doc_pages import PAGES, blocks, commands_with_output
from tests.pod_fixtures import NUM_SAMPLES

import refill
from refill_service.cli import main
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

BLOCKS = [
    pytest.param(text, id=f"{page.name}-{number}")
    for page in PAGES
    if page.name != "COMING_FROM.md"  # what it shows are parts of examples, which the tests of trainers run
    for number, text in enumerate(blocks(page, "python"))
    if ("refill.Cache" in text or "refill.iterate" in text)
    and not text.startswith("class ")  # a trainer's, whom the tests of trainers run
]


ANALYSES = [
    pytest.param(command, printed, id=f"{page.name}-{left}", marks=[pytest.mark.variant] if left else [])
    for page in PAGES
    for left, (command, printed) in enumerate(reversed(commands_with_output(page, "refill analyze --samples")))
]
"""Each simulates epochs, for tens of seconds: ``make test`` has the last of each page."""
NUM_PHOTOS = 40


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset of photos as a folder of them is: JPEG files of several sizes, one of them grey, in two classes."""
    source, store = tmp_path_factory.mktemp("photos"), tmp_path_factory.mktemp("store")
    for number in range(NUM_PHOTOS):
        of_class = source / ("dog" if number % 2 else "cat")
        of_class.mkdir(exist_ok=True)
        size = (40 + 7 * (number % 5), 30 + 11 * (number % 3))
        Image.new("L" if number == 7 else "RGB", size).save(of_class / f"{number:04}.jpg")
    asyncio.run(pack(str(source), store.as_uri()))
    return store.as_uri()


@pytest.mark.parametrize("text", BLOCKS)
def test_they_run(
    three_pods: LocalCluster,
    job: dict[str, Any],
    packed: tuple[str, dict[str, bytes]],
    photos: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = three_pods.pod_urls[0]
    store, count = (photos, NUM_PHOTOS) if '["jpg"]' in text else (packed[0], NUM_SAMPLES)
    dataset = f'"{url}", dataset="{store}", job="{job["name"]}"'
    if "random_split" in text:  # the dataset and two parts are three jobs, and pods here have memory for two
        dataset += ", chunk_size=16, memory_bytes=600_000"
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
        "__name__": "__main__",
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "train": lambda *given: torch.rand(len(given[-1]["__id__"])),
        "weights": torch.ones(NUM_SAMPLES),
        "epoch": 0,
    }
    if "import refill" not in text:  # lines to go on with after some that have them
        names |= {"refill": refill, "torch": torch, "os": os}
    exec(compile(text, "the docs", "exec"), names)
    dataset = names.get("dataset") or names["reader"]
    assert (dataset.num_samples if "reader" in names else len(dataset)) == count
    if any(loop in text for loop in ("in loader", "in refill.timed", "in reader")):
        counts = dataset.epoch_counts(0)["total"]
        if "ImportanceSampler" in text:
            assert counts["takes"] + counts["repeats"] == count, "the loop had every position once"
        else:
            assert counts["takes"] == count, "the loop had every sample once"


def test_the_worked_examples_are_there() -> None:
    assert sum("INSTALL" in str(each.id) for each in ANALYSES) == 3


@pytest.mark.parametrize(("command", "printed"), ANALYSES)
def test_analyses_print_what_is_shown(command: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line that is shown; the page may leave some out."""
    assert main(shlex.split(command)[1:]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in filter(None, printed.splitlines()):
        assert " ".join(line.split()) in lines, line
